"""Prompts from files, and results into a file that a later run continues with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.errors import UserError
from cuboid.generate.detokenizer import Words


@dataclass(frozen=True)
class Prompt:
    number: int
    text: str
    tokens: tuple[int, ...]


def read_prompts(path: Path, words: Words, vocabulary: int) -> list[Prompt]:
    """A prompt per line: text, or JSON objects with `prompt` (text) or `tokens` (a list of numbers)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"prompts={path} cannot be read: {reason}; name a file of text or JSON Lines") from None
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
        table = json.loads(line)
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
        self._path, self._made_with = path, made_with
        self.done: dict[int, dict[str, Any]] = {}
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            for line in whole.splitlines():
                row = json.loads(line)
                self._check(row, prompts)
                self.done[row["index"]] = row
            self._file = path.open("ab", buffering=0)
            self._file.truncate(len(whole))
        except OSError as error:
            raise UserError(
                f"output={path} cannot be written: {error.strerror}; name a file in a folder that exists"
            ) from None
        except (ValueError, KeyError, TypeError):
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
        line = (json.dumps({**row, "made_with": self._made_with}, ensure_ascii=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
        except OSError as error:
            raise UserError(
                f"output={self._path} cannot be written: {error.strerror}; make room and run it again"
            ) from None

    def close(self) -> None:
        self._file.close()
