"""Text to tokens and back: bytes, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuboid.data.store import TOKENIZER, is_store, read_manifest
from cuboid.errors import UserError, either
from cuboid.spec.training import DataSpec

BYTES = "byte"
END_OF_DOCUMENT = 256
"""The token after each document of bytes; 0 to 255 are the bytes."""
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "<|endofdoc|>")
TOGETHER = 1 << 18
"""Characters encoded in one call: results of the library are many times larger than the tokens they hold."""


class Tokenizer(Protocol):
    name: str
    vocabulary: int
    """Every token is below."""
    end_of_document: int
    fingerprint: str
    """Equal for tokenizers that give equal tokens."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Tokens of each text, without any that mark begin or end."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    name = BYTES
    vocabulary = END_OF_DOCUMENT + 1
    end_of_document = END_OF_DOCUMENT
    fingerprint = "bytes, 256 ends a document"

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < END_OF_DOCUMENT).decode(errors="replace")


class HuggingFaceTokenizer:
    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"tokenizer={path} needs a package that is not installed; pip install tokenizers") from None
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except OSError as error:
            raise UserError(
                f"tokenizer={path} cannot be read: {error.strerror}; use byte or a tokenizer.json"
            ) from None
        except Exception as error:  # the library raises plain Exception for what it cannot parse
            raise UserError(f"tokenizer={path} is not a tokenizer.json: {str(error).splitlines()[0]}") from None
        # A tokenizer.json may carry the limits of the model it came with; documents are cut later.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.vocabulary = max(vocabulary.values()) + 1
        end = end_of_document or _configured_end(path) or next((word for word in USUAL_ENDS if word in vocabulary), "")
        if end not in vocabulary:
            known = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()][:6]
            raise UserError(
                f"end_of_document={end or 'unknown'} is no token of {path}; "
                f"use --end-of-document with {either(known) or 'one of its tokens'}"
            )
        self.end_of_document = int(vocabulary[end])
        self.fingerprint = f"{hashlib.sha256(text.encode()).hexdigest()}, {self.end_of_document} ends a document"

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        arrays: list[NDArray[Any]] = []
        batch: list[str] = []
        size = 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= TOGETHER:
                arrays += self._encode(batch)
                batch, size = [], 0
        return arrays + self._encode(batch)

    def _encode(self, batch: list[str]) -> list[NDArray[Any]]:
        found = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """`byte`, a tokenizer.json, or a folder that holds one."""
    if name == BYTES:
        if end_of_document is not None:
            raise UserError(
                f"end_of_document={end_of_document} is no token of bytes; omit it, or name a tokenizer.json"
            )
        return ByteTokenizer()
    path = Path(name)
    return HuggingFaceTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_of_document)


def _configured_end(path: Path) -> str | None:
    """The end-of-text token that a tokenizer_config.json beside the tokenizer names."""
    try:
        end = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


# The tokenizer of a training's data as the files Hugging Face looks for beside a model.


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
