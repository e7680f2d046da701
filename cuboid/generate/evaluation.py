"""Questions whose answer is a likelihood: how well a model predicts text, and which of several continuations it
prefers; without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.data.indexed import pair_paths
from cuboid.data.opened import open_source
from cuboid.errors import UserError
from cuboid.generate.batch import Request
from cuboid.generate.detokenizer import Words
from cuboid.readers import Unreadable, parse_json, read_text


@dataclass(frozen=True)
class Score:
    """Of some tokens of a text; those of its windows add up."""

    number: int
    """Of the text."""
    tokens: int
    likelihood: float
    """The logarithm of their probability, each after all tokens before it."""
    likeliest: bool
    """Whether each is the likeliest token of all at its place."""

    def __add__(self, other: Score) -> Score:
        likelihood = self.likelihood + other.likelihood
        return Score(self.number, self.tokens + other.tokens, likelihood, self.likeliest and other.likeliest)


def windows(tokens: Sequence[int], sequence: int, overlap: int = 0) -> list[Request]:
    """Every token but the first is asked for once, `sequence` of them in each request, after up to `overlap` tokens of
    the window before."""
    requests: list[Request] = []
    for start in range(0, len(tokens) - 1, sequence):
        stop = min(start + sequence, len(tokens) - 1)
        given = tuple(tokens[max(0, start - overlap) : stop])
        requests.append(Request(len(requests), given, labels=tuple(tokens[start + 1 : stop + 1])))
    return requests


@dataclass(frozen=True)
class Perplexity:
    tokens: int
    loss: float
    """Nats per token."""
    bytes: int
    """Of the text that these tokens are; 0 where that is unknown."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


@dataclass(frozen=True)
class Question:
    """A prompt, what may follow it, and which of these is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """JSON Lines: {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}."""
    try:
        lines = read_text(path, instead="name a file of JSON Lines").splitlines()
    except Unreadable as error:
        raise UserError(f"choices={error}") from None
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"choices={path} holds no question; write one on each line")
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    try:
        table: dict[str, Any] = parse_json(line)
        question = Question(table["prompt"], tuple(table["choices"]), table["answer"])
        texts = [question.prompt, *question.choices]
        if all(isinstance(text, str) for text in texts) and question.choices[question.answer] and question.answer >= 0:
            return question
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise UserError(
        f'line {number} of choices={path} is no question; write {{"prompt": "2 + 2 =", "choices": [" 4", " 5"], '
        '"answer": 0}'
    )


def pair_request(number: int, before: str, after: str, words: Words) -> Request:
    """How likely `after` is behind `before`. Both are made into tokens together, as text that follows text is; what
    begins in `after`, and spaces before it, are asked for."""
    tokens = words.encode(before + after)
    first = max(1, min(len(words.encode(before.rstrip())), len(tokens) - 1))
    return Request(number, tokens[:-1], labels=tokens[first:])


def choice_requests(questions: Sequence[Question], words: Words) -> list[Request]:
    """One for each choice, one question after another."""
    requests: list[Request] = []
    for number, question in enumerate(questions):
        for choice in question.choices:
            requests.append(pair_request(len(requests), question.prompt, choice, words))
            if not requests[-1].tokens:
                raise UserError(f"question {number} has less than two tokens; write a prompt and choices")
    return requests


@dataclass(frozen=True)
class Accuracy:
    questions: int
    right: int
    """How often the right choice is the likeliest,"""
    right_by_byte: int
    """and how often it is by the mean over its bytes, which does not prefer short ones."""
    chosen: tuple[int, ...]


def judge(questions: Sequence[Question], likelihoods: Sequence[float]) -> Accuracy:
    """`likelihoods`: of all choices, one question after another."""
    place, right, by_byte, chosen = 0, 0, 0, []
    for question in questions:
        found = likelihoods[place : place + len(question.choices)]
        place += len(question.choices)
        means = [value / max(1, len(text.encode())) for value, text in zip(found, question.choices, strict=True)]
        chosen.append(found.index(max(found)))
        right += chosen[-1] == question.answer
        by_byte += means.index(max(means)) == question.answer
    return Accuracy(len(questions), right, by_byte, tuple(chosen))


# The tokens of data that a model is measured on: of any source a training can have, or of a file of text.


def read_tokens(source: str, count: int, words: Words, vocabulary: int) -> list[int]:
    """The first `count` of them."""
    path = Path(source)
    if path.is_file() and not any(half.is_file() for half in pair_paths(path)):
        if not words.tokenizer:
            raise UserError(f"data={source} is text and the model has no tokenizer; use --tokenizer byte or FOLDER")
        try:
            text = read_text(path, instead="name a file of text, or a store")
        except Unreadable as error:
            raise UserError(f"data={error}") from None
        found = list(words.encode(text))[:count]
    else:
        if source == "synthetic":
            raise UserError("data=synthetic is no text; use python-stdlib, a store or a file of text")
        found = open_source(source).tokens.tokens[:count].tolist()
    if len(found) < 2:
        raise UserError(f"data={source} has {len(found)} tokens, of which none follows another; use longer text")
    if max(found) >= vocabulary:
        raise UserError(f"data={source} holds token {max(found)}, not below the model's vocab={vocabulary}")
    return found
