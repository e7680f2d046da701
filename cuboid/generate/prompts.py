"""Prompts from files, what ranks are started with, and the texts that follow, token by token; without torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.errors import UserError
from cuboid.generate.batch import Event, Request
from cuboid.generate.detokenizer import Reader, Words
from cuboid.outputs import keep_checkpoints
from cuboid.readers import Unreadable, parse_json, read_bytes, read_text
from cuboid.spec.generation import SamplingSpec
from cuboid.spec.model import ModelSpec
from cuboid.strict_json import json_text

# Prompts from files, and results into a file that a later run continues with.


@dataclass(frozen=True)
class Prompt:
    number: int
    text: str
    tokens: tuple[int, ...]


def read_prompts(path: Path, words: Words, vocabulary: int) -> list[Prompt]:
    """A prompt per line: text, or JSON objects with `prompt` (text) or `tokens` (a list of numbers)."""
    try:
        lines = read_text(path, instead="name a file of text or JSON Lines").splitlines()
    except Unreadable as error:
        raise UserError(f"prompts={error}") from None
    found: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            given = _parse(path, number, line) if path.suffix == ".jsonl" else line
            found.append(make_prompt(len(found), given, words, vocabulary, f"line {number} of prompts={path}"))
    if not found:
        raise UserError(f"prompts={path} holds no prompt; write one on each line")
    return found


def _parse(path: Path, number: int, line: str) -> str | tuple[int, ...]:
    try:
        table = parse_json(line)
    except ValueError:
        table = None
    if isinstance(table, str):
        return table
    if isinstance(table, dict):
        if isinstance(table.get("prompt"), str):
            return str(table["prompt"])
        tokens = table.get("tokens")
        if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
            return tuple(tokens)
    raise UserError(f'line {number} of prompts={path} is no prompt; write {{"prompt": "…"}} or {{"tokens": [1, 2]}}')


def make_prompt(number: int, given: str | tuple[int, ...], words: Words, vocabulary: int, where: str) -> Prompt:
    if isinstance(given, str):
        if not words.tokenizer:
            raise UserError(
                f"{where} is text and the model has no tokenizer; use --tokenizer byte or --tokenizer FOLDER, or "
                '--prompts with lines like {"tokens": [1, 2]}'
            )
        tokens = words.encode(given)
    else:
        tokens = given
    if not tokens:
        raise UserError(f"{where} is empty; write at least one token")
    if max(tokens) >= vocabulary or min(tokens) < 0:
        wrong = max(tokens) if max(tokens) >= vocabulary else min(tokens)
        raise UserError(f"token {wrong} of {where} is not in the model's vocabulary; use tokens 0 to {vocabulary - 1}")
    return Prompt(number, given if isinstance(given, str) else words.decode(tokens), tokens)


class Results:
    """A line of JSON for each prompt that is done, written whole or not at all."""

    def __init__(self, path: Path, prompts: Sequence[Prompt], made_with: dict[str, Any]) -> None:
        """Refuses what another question wrote there; a line that a killed run left half is taken away."""
        keep_checkpoints("output=", path)
        self._path, self._made_with = path, made_with
        self.done: dict[int, dict[str, Any]] = {}
        try:
            content = read_bytes(path) if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            for line in whole.splitlines():
                row = parse_json(line, nul=True)
                self._check(row, prompts)
                self.done[row["index"]] = row
            self._file = path.open("ab", buffering=0)
            self._file.truncate(len(whole))
        except OSError as error:
            raise UserError(
                f"output={path} cannot be written: {error.strerror}; name a file in a folder that exists"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"output={path} holds something other than results; name another file") from None

    def _check(self, row: dict[str, Any], prompts: Sequence[Prompt]) -> None:
        for name, value in self._made_with.items():
            if row["made_with"].get(name) != value:
                raise UserError(
                    f"output={self._path} was made with {name}={row['made_with'].get(name)}, not {value}; "
                    "name another file"
                )
        number = row["index"]
        if number >= len(prompts) or list(prompts[number].tokens) != row["prompt_tokens"]:
            raise UserError(f"output={self._path} answers another prompt {number}; name another file")

    def add(self, row: dict[str, Any]) -> None:
        line = (json_text({**row, "made_with": self._made_with}, ascii_only=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
        except OSError as error:
            raise UserError(
                f"output={self._path} cannot be written: {error.strerror}; make room and run it again"
            ) from None

    def close(self) -> None:
        self._file.close()


# Prompts and wishes made into what ranks are started with; what cannot work is refused here.


def make_requests(prompts: Sequence[Prompt], sampling: SamplingSpec, model: ModelSpec) -> list[Request]:
    """A prompt and what follows it must fit into the model's context; results end where it does."""
    requests = []
    for prompt in prompts:
        room = model.max_positions - len(prompt.tokens)
        if room < 1:
            raise UserError(
                f"prompt {prompt.number} has {len(prompt.tokens)} tokens and max_positions={model.max_positions} of "
                f"{model.name} leaves no room behind it; use at most {model.max_positions - 1}"
            )
        requests.append(Request(prompt.number, prompt.tokens, min(room, sampling.max_tokens)))
    return requests


def check_words(sampling: SamplingSpec, words: Words) -> None:
    """Strings to stop at need text to be found in."""
    if sampling.stop and not words.tokenizer:
        raise UserError(f"stop={sampling.stop[0]!r} is text and the model has no tokenizer; use --tokenizer byte")


def longest(requests: Sequence[Request]) -> int:
    """Tokens of the longest text there can be."""
    return max(len(request.tokens) + request.room for request in requests)


# Texts as they grow, token by token, to whoever shows or keeps them; without torch.


class Text:
    """What follows one prompt."""

    def __init__(self, prompt: Prompt, words: Words, stop: tuple[str, ...]) -> None:
        self.prompt, self.tokens, self.ending = prompt, list[int](), ""
        self._reader, self._stop = Reader(words), stop
        self.text = ""

    def add(self, event: Event) -> str:
        """What is new to show. What may be the beginning of a string to stop at is held back."""
        self.tokens.append(event.token)
        self.ending = event.ending
        self._reader.add([event.token])
        whole = self._reader.text if not self.ending else self._reader.finish()
        cut = min((place for place in (whole.find(stop) for stop in self._stop) if place >= 0), default=len(whole))
        whole = whole[:cut]
        if not self.ending:
            longest = max((len(stop) for stop in self._stop), default=1) - 1
            whole = whole[: len(whole) - longest] if longest else whole
        new = whole[len(self.text) :]
        self.text += new
        return new

    def row(self) -> dict[str, Any]:
        return {
            "index": self.prompt.number,
            "prompt": self.prompt.text,
            "text": self.text,
            "ending": self.ending,
            "prompt_tokens": list(self.prompt.tokens),
            "tokens": self.tokens,
        }


class Texts:
    """All of them. They are shown in the order of prompts: the first that is not done streams, others wait."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        words: Words,
        stop: tuple[str, ...],
        show: Callable[[Prompt, str, bool], None],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """`show` is told a prompt, what is new behind it, and whether that is all; `keep` a finished row."""
        self._texts = {prompt.number: Text(prompt, words, stop) for prompt in prompts}
        self._order = [prompt.number for prompt in prompts]
        self._show, self._keep = show, keep
        self._start = time.perf_counter()
        self.first_token_seconds: float | None = None
        self.tokens = self.drafts = self.accepted = 0

    def hear(self, events: list[Event]) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds
        self.tokens += len(events)
        for event in events:
            self.drafts += event.drafted
            self.accepted += event.accepted
            text = self._texts[event.number]
            new = text.add(event)
            if text.ending:
                self._keep(text.row())
            if self._order and event.number == self._order[0]:
                self._show(text.prompt, new, bool(text.ending))
                if text.ending:
                    self._order.pop(0)
                    self._show_waiting()

    def _show_waiting(self) -> None:
        while self._order:
            text = self._texts[self._order[0]]
            self._show(text.prompt, text.text, bool(text.ending))
            if not text.ending:
                return
            self._order.pop(0)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start
