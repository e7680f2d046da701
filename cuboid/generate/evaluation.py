"""Questions whose answer is a likelihood: how well a model predicts text, and which of several continuations it
prefers; without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from numpy.typing import NDArray

from cuboid.data.indexed import pair_paths
from cuboid.data.opened import OpenedSource, is_own, open_source, same_data, split_documents
from cuboid.errors import UserError
from cuboid.generate.batch import Request
from cuboid.generate.detokenizer import Words
from cuboid.readers import Unreadable, parse_json, read_text
from cuboid.spec.run import Run


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


HELD_OUT = "held-out"
"""The data that the run itself held out."""
USUAL = 1 << 17
"""Tokens that are measured where nobody says how many."""
BYTES = 100
"""Of this process's memory for each token: the number, and its places in a window and in the labels."""


@dataclass(frozen=True)
class MeasuredData:
    tokens: list[int]
    trained_on: bool | None
    """Whether the model learned from them; None where nobody knows."""


def read_tokens(
    source: str, count: int | None, words: Words, vocabulary: int, run: Run | None = None, known: str = ""
) -> MeasuredData:
    """The first `count` of them, which the data must hold; None: as many as are usual, or all where there are fewer.
    `run`: that trained the model. `known`: the identity of its data as its checkpoint has it."""
    path = Path(source)
    if path.is_file() and not any(half.is_file() for half in pair_paths(path)):
        found, held, trained_on = *_text(path, words, USUAL if count is None else count), None
    elif source == HELD_OUT:
        found, held, trained_on = _held_out(run, known, USUAL if count is None else count)
    else:
        if source == "synthetic":
            raise UserError("data=synthetic is no text; use python-stdlib, a store or a file of text")
        tokens = open_source(source).tokens.tokens
        held, trained_on = len(tokens), _is_trained_on(source, run)
        found = some_tokens(tokens, held, USUAL if count is None else count)
    if count is not None and count > held:
        raise UserError(f"tokens={count:,} is more than the {held:,} of data={source}; use --tokens {held} or less")
    if len(found) < 2:
        raise UserError(f"data={source} has {len(found)} tokens, of which none follows another; use longer text")
    if max(found) >= vocabulary:
        raise UserError(f"data={source} holds token {max(found)}, not below the model's vocab={vocabulary}")
    return MeasuredData(found, trained_on)


def some_tokens(tokens: Sequence[Any] | NDArray[Any], held: int, count: int) -> list[int]:
    """The first of them; none where there are not so many that they could be had."""
    free = psutil.virtual_memory().available
    if min(count, held) * BYTES > free:
        raise UserError(
            f"tokens={min(count, held):,} take about {min(count, held) * BYTES / 1e9:.3g} GB of memory, and "
            f"{free / 1e9:.3g} GB are free; use --tokens {free // BYTES // 1000 * 1000} or less"
        )
    return [int(token) for token in tokens[:count]]


def _text(path: Path, words: Words, count: int) -> tuple[list[int], int]:
    if not words.tokenizer:
        raise UserError(f"data={path} is text and the model has no tokenizer; use --tokenizer byte or FOLDER")
    try:
        text = read_text(path, instead="name a file of text, or a store")
    except Unreadable as error:
        raise UserError(f"data={error}") from None
    found = words.encode(text)
    return some_tokens(found, len(found), count), len(found)


def _held_out(run: Run | None, known: str, count: int) -> tuple[list[int], int, bool]:
    """Of a mixture each source gives its weight of them."""
    if run is None or not run.data.holds_out:
        raise UserError(
            f"data={HELD_OUT} needs a run that held data out, with data.validation or data.validation_fraction; use "
            "--data and a source it was not trained on"
        )
    data = run.data
    if is_own(data.validation) or any(is_own(name) for name in data.sources):
        raise UserError(
            f"data={HELD_OUT} of this run is a data set of one's own; use --data and a store or a text file"
        )
    if data.validation:
        tokens = open_source(data.validation).tokens.tokens
        return some_tokens(tokens, len(tokens), count), len(tokens), _is_trained_on(data.validation, run) is True
    # The split is of the documents there are: of other data it would hold some that were trained on.
    if known and not same_data(run, known):
        raise UserError(
            f"data={HELD_OUT} is not what the run held out: data.source={', '.join(data.sources)} holds other samples "
            "than it did when the checkpoint was saved; use the same data, or --data and a source it was not trained on"
        )
    found: list[int] = []
    held, total = 0, sum(data.weights.values())
    for name, weight in data.weights.items():
        opened = open_source(name).tokens
        start = opened.document_start
        split = split_documents(opened.documents, data.validation_fraction, name)
        ranges = [(start(first), start(last)) for first, last in split.held_out]
        left = -int(-count * weight // total)
        for first, last in ranges:
            taken = some_tokens(opened.tokens[first:last], last - first, left)
            found, left = found + taken, left - len(taken)
        held += sum(last - first for first, last in ranges)
    return found[:count], held, False


def _is_trained_on(source: str, run: Run | None) -> bool | None:
    """By what the data is, not by its name: a store may have been moved."""
    if run is None:
        return None
    measured = open_source(source)
    return any(name == source or (not is_own(name) and _is_equal(name, measured)) for name in run.data.sources)


def _is_equal(source: str, measured: OpenedSource) -> bool:
    """What a run was trained on may be gone. Counts first: they cost nothing, and bytes much."""
    try:
        opened = open_source(source)
    except UserError:
        return False
    return opened.counts == measured.counts and opened.identity == measured.identity
