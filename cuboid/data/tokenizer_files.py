"""The tokenizer of a training's data as the files Hugging Face looks for beside a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuboid.data.store import TOKENIZER, is_store, read_manifest
from cuboid.data.tokenizer import BYTES, END_OF_DOCUMENT
from cuboid.spec.data import DataSpec

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerFiles:
    note: str
    """Which tokenizer it is, or why there is none."""
    files: dict[str, bytes] = field(default_factory=dict)
    end_of_document: int | None = None


def tokenizer_files(data: DataSpec) -> TokenizerFiles:
    """Of the first source that tells its tokenizer."""
    reasons = []
    for source in data.sources:
        if source == "python-stdlib":
            return _bytes(source)
        path = Path(source)
        if not is_store(path):
            where = "holds random tokens" if source == "synthetic" else "is no store or no longer there"
            reasons.append(f"data.source={source} {where}")
            continue
        manifest = read_manifest(path)
        if TOKENIZER not in manifest.files:
            return _bytes(source)
        text = (path / TOKENIZER).read_bytes()
        config = _config(_token(json.loads(text), manifest.end_of_document))
        return TokenizerFiles(f"the tokenizer.json of {source}", {TOKENIZER: text, **config}, manifest.end_of_document)
    return TokenizerFiles(f"none, because {reasons[0]}")


def _bytes(source: str) -> TokenizerFiles:
    text = json.dumps(byte_tokenizer(), ensure_ascii=False).encode()
    return TokenizerFiles(f"{BYTES}s, as in {source}", {TOKENIZER: text, **_config(END_OF_TEXT)}, END_OF_DOCUMENT)


def _config(end: str | None) -> dict[str, bytes]:
    table: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if end is not None:
        table["eos_token"] = end
    return {"tokenizer_config.json": json.dumps(table, indent=2).encode()}


def _token(tokenizer: dict[str, Any], number: int) -> str | None:
    added = (token["content"] for token in tokenizer.get("added_tokens", ()) if token.get("id") == number)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = (token for token, place in vocabulary.items() if place == number) if isinstance(vocabulary, dict) else ()
    return next(added, None) or next(iter(known), None)


def byte_tokenizer() -> dict[str, Any]:
    """Bytes as a tokenizer.json: a vocabulary of the 256 bytes and no merges. The library writes each byte as a
    character that can be seen: itself where it can, else one from 256 on, in the order of the bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    end = {"id": END_OF_DOCUMENT, "content": END_OF_TEXT, "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **plain}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {characters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
