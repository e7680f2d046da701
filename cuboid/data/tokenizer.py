"""Text to tokens and back: bytes, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuboid.data.store import TOKENIZER, is_store, read_manifest
from cuboid.errors import UserError, either
from cuboid.readers import LARGEST_TABLE, Missing, Unreadable, parse_json, read_bytes, read_json, read_text
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
        try:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]
        except UnicodeEncodeError as error:
            raise UserError(f"the text {error.object[:40]!r} holds half a character; write text in UTF-8") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < END_OF_DOCUMENT).decode(errors="replace")


LARGEST_VOCABULARY = 1 << 24
"""Tokens: the largest vocabularies have a quarter of a million."""
RUNAWAY = re.compile(r"[*+}]\)+[*+{]|\|[^()]*\)[*+{]")
"""A group that repeats, with repeats or alternatives inside: some such patterns take for ever on some texts."""
TRIAL_SECONDS = 10.0
LONGEST_TEXT = 24 << 20
"""Characters: the library takes some 60 bytes for each token, and a token may be one character."""
MOST_GROWTH = 10_000
"""Times that its normalizer may lengthen a text: those in use put one character in the place of another."""


def open_tokenizer(text: str, where: str) -> Any:
    """The library's tokenizer of a tokenizer.json that has tokens, and whose patterns end."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{where} needs a package that is not installed; pip install tokenizers") from None
    try:
        table = parse_json(text, nul=True)
        found = tokenizers.Tokenizer.from_str(text)
        ids = found.get_vocab(with_added_tokens=True).values()
    # The library raises plain Exception for what it cannot parse, and panics, which are no Exception.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where} is not a tokenizer.json: {said}; copy it again") from None
    if not ids:
        raise UserError(f"{where} is not a tokenizer.json: its vocabulary is empty; copy it again")
    if max(ids) >= LARGEST_VOCABULARY or min(ids) < 0:
        wrong = max(ids) if max(ids) >= LARGEST_VOCABULARY else min(ids)
        raise UserError(f"{where} has a token {wrong}; tokens must be below {LARGEST_VOCABULARY:,}")
    growth = math.prod(len(text) for text in _inserted(table.get("normalizer")))
    if growth > MOST_GROWTH:
        raise UserError(f"{where} has a normalizer that makes texts {growth:,} times as long; use another tokenizer")
    for pattern in _patterns(table):
        if RUNAWAY.search(pattern):
            _require_end(json.dumps(table), pattern, where)
    # A tokenizer.json may carry the limits of the model it came with; documents are cut later.
    found.no_truncation()
    found.no_padding()
    return found


def _patterns(value: object) -> Iterator[str]:
    """Every regular expression in a tokenizer.json."""
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _patterns(each)


def _inserted(normalizer: object) -> Iterator[str]:
    """Every text that a normalizer puts before others, or in their place."""
    if isinstance(normalizer, dict):
        yield from (text for key in ("prepend", "content") if isinstance(text := normalizer.get(key), str) and text)
        normalizer = normalizer.get("normalizers")
    for each in normalizer if isinstance(normalizer, list) else ():
        yield from _inserted(each)


def _require_end(text: str, pattern: str, where: str) -> None:
    """Tries texts that such patterns fail on, in a process that can be ended; `text`: the tokenizer, in one line."""
    letters = sorted({letter for letter in pattern if letter.isalnum()} | set("a0 "))
    trial = "import sys, tokenizers; t = tokenizers.Tokenizer.from_str(sys.stdin.readline())\n"
    trial += "for c in sys.argv[1]: t.encode(c * 64 + '!\\n')"
    try:
        subprocess.run(
            [sys.executable, "-c", trial, "".join(letters)],
            input=text + "\n",
            text=True,
            capture_output=True,
            timeout=TRIAL_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        raise UserError(
            f"{where} has the pattern {pattern!r}, which takes for ever on some texts; use one without nested repeats"
        ) from None


def encode_batch(tokenizer: Any, texts: list[str], where: str, special: bool = False) -> list[list[int]]:
    """Tokens of each text; what the library cannot encode it raises as a plain Exception."""
    longest = max(map(len, texts), default=0)
    if longest > LONGEST_TEXT:
        raise UserError(
            f"{where} is given a text of {longest:,} characters and takes {LONGEST_TEXT:,} at once; write it as JSON "
            "Lines of smaller documents"
        )
    try:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=special)]
    except Exception as error:
        said = (str(error).splitlines() or ["it does not say why"])[0]
        raise UserError(f"{where} cannot encode: {said}; use another tokenizer") from None


class HuggingFaceTokenizer:
    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        try:
            text = read_text(path, LARGEST_TABLE, "use byte or a tokenizer.json")
        except Unreadable as error:
            raise UserError(f"tokenizer={error}") from None
        self._tokenizer = open_tokenizer(text, f"tokenizer={path}")
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
        found = encode_batch(self._tokenizer, batch, f"tokenizer={self.name}")
        return [np.array(tokens, dtype=np.int32) for tokens in found]

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
        end = read_json(path.parent / "tokenizer_config.json").get("eos_token")
    except Missing:
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
        text = read_bytes(path / TOKENIZER)
        config = _config(_token(read_json(path / TOKENIZER, nul=True), manifest.end_of_document))
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
