"""Text to tokens of a model and back, and which tokens end a text; without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cuboid.data.store import TOKENIZER
from cuboid.data.tokenizer import ByteTokenizer, byte_tokenizer, encode_batch, open_tokenizer
from cuboid.errors import UserError
from cuboid.readers import parse_json

GENERATION, CONFIG = "generation_config.json", "config.json"
BROKEN = "\N{REPLACEMENT CHARACTER}"
TAIL = 8
"""Tokens before a string to stop at that may belong to its first character."""


@dataclass(frozen=True)
class Words:
    tokenizer: str = ""
    """A tokenizer.json; empty: there is none, and prompts and results are tokens."""
    ends: tuple[int, ...] = ()
    """Tokens after which nothing follows."""
    begins: bool = False
    """Whether prompts get what the tokenizer puts before and after a text, as models of Hugging Face expect."""

    @cached_property
    def _library(self) -> Any:
        if self.tokenizer == json.dumps(byte_tokenizer(), ensure_ascii=False):
            return None
        return open_tokenizer(self.tokenizer, "this model's tokenizer")

    def encode(self, text: str) -> tuple[int, ...]:
        if self._library is None:
            return tuple(int(token) for token in ByteTokenizer().encode([text])[0])
        return tuple(encode_batch(self._library, [text], "this model's tokenizer", self.begins)[0])

    def decode(self, tokens: Sequence[int]) -> str:
        if not self.tokenizer:
            return ""
        if self._library is None:
            return ByteTokenizer().decode(tokens)
        return str(self._library.decode(list(tokens)))

    def stops(self, tokens: Sequence[int], stop: Iterable[str]) -> bool:
        """Whether the last token brings one of these strings."""
        longest = max(len(text.encode()) for text in stop) + TAIL
        tail = self.decode(tokens[-longest:])
        return any(text in tail for text in stop)


def words_of(files: Mapping[str, bytes], begins: bool) -> Words:
    """From the files that stand beside a model."""
    ends: set[int] = set()
    for name in (CONFIG, GENERATION):
        found = _table(name, files.get(name, b"{}")).get("eos_token_id")
        listed = found if isinstance(found, list) else [found] if found is not None else []
        if not all(isinstance(token, int) for token in listed):
            raise UserError(f"eos_token_id={found} of {name} is no token; it must be an integer or a list of them")
        ends = set(listed) or ends
    try:
        return Words(files.get(TOKENIZER, b"").decode(), tuple(sorted(ends)), begins)
    except UnicodeDecodeError as problem:
        raise UserError(f"{TOKENIZER} is not UTF-8 text at byte {problem.start}; copy the model again") from None


def _table(name: str, content: bytes) -> dict[str, Any]:
    try:
        table = parse_json(content)
    except ValueError as problem:
        raise UserError(f"{name} is not JSON: {problem}; copy the model again") from None
    if not isinstance(table, dict):
        raise UserError(f"{name} does not hold a JSON object; copy the model again")
    return table


class Reader:
    """Turns tokens that come one by one into text that only grows: a character is said when all its bytes are there."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._tokens: list[int] = []
        self._said = self._from = 0
        self.text = ""

    def add(self, tokens: Iterable[int]) -> None:
        self._tokens += tokens
        before = self._words.decode(self._tokens[self._from : self._said])
        now = self._words.decode(self._tokens[self._from :])
        if not now.endswith(BROKEN):
            self._from, self._said = self._said, len(self._tokens)
            self.text += now[len(before) :]

    def finish(self) -> str:
        """The whole text: what is missing of its last character will not come."""
        before = self._words.decode(self._tokens[self._from : self._said])
        return self.text + self._words.decode(self._tokens[self._from :])[len(before) :]
