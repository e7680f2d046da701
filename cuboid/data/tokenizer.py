"""Text to tokens and back: bytes, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuboid.errors import UserError
from cuboid.spec.suggest import either

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
