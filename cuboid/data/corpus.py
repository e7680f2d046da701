"""Corpora: numbered samples. A sample is (tokens, labels), each of the sequence's length, labels one token ahead."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cuboid.data.indexed import IndexedTokens
from cuboid.data.opened import OpenedSource
from cuboid.errors import UserError
from cuboid.model.batch import IGNORED

# Where a sample comes from, for people who look for it.


@dataclass(frozen=True)
class Origin:
    source: str
    sample: int
    """Its number in that source."""
    documents: tuple[int, int] | None = None
    """First and last document of which it holds tokens; None where there are no documents."""


def document_of(tokens: IndexedTokens, place: int) -> int:
    """The document in which a token lies."""
    return bisect_right(range(tokens.documents), place, key=tokens.document_start) - 1


Sample = tuple[Tensor, Tensor]
Fields = dict[str, Tensor]
"""A sample of a data set of one's own, by name."""


class Corpus(Protocol):
    size: int
    """How many samples there are."""

    def sample(self, index: int) -> Sample | Fields: ...

    def documents(self, index: int) -> Tensor:
        """Which document of the sample each token belongs to: numbers that grow from 0."""
        ...

    def origin(self, index: int) -> Origin: ...


class _Documents:
    """What packed and padded samples share: labels, and which of them count."""

    def __init__(self, opened: OpenedSource, vocabulary: int, sequence: int, mask_across_documents: bool) -> None:
        self._opened = opened
        self._vocabulary = vocabulary
        self._sequence = sequence
        self._mask_across_documents = mask_across_documents

    def check_whole(self) -> None:
        self._opened.tokens.check_whole()

    def _window(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens start..stop-1, and which of them count as labels."""
        tokens = self._opened.tokens.tokens[start:stop].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise UserError(
                f"data.source={self._opened.name} holds token {tokens.max()} near {start:,}, which is not in "
                f"model.vocab={self._vocabulary}; run `cuboid data verify {self._opened.name}`"
            )
        counts = np.ones(len(tokens), dtype=np.bool_)
        if self._mask_across_documents:
            counts[self._opened.tokens.document_starts(start, stop) - start] = False
        if self._opened.completions:
            first, starts = self._opened.tokens.sequence_starts(start, stop)
            sequence = first - 1 + np.searchsorted(starts, np.arange(start, stop), side="right")
            counts &= sequence % 2 == 1
        return tokens, counts


class Packed(_Documents):
    """Documents one after another, cut into windows; the label of a window's last token is the next one's first."""

    def __init__(
        self,
        opened: OpenedSource,
        vocabulary: int,
        sequence: int,
        ranges: Sequence[tuple[int, int]],
        mask_across_documents: bool = False,
    ) -> None:
        """`ranges`: of documents; they follow one another as if they were neighbours."""
        super().__init__(opened, vocabulary, sequence, mask_across_documents)
        start = opened.tokens.document_start
        self._starts = [start(first) for first, _ in ranges]
        self._ends = list(accumulate(start(last) - start(first) for first, last in ranges))
        self.size = max(self._ends[-1] - 1, 0) // sequence

    def sample(self, index: int) -> Sample:
        last = (index + 1) * self._sequence + 1
        windows = [self._window(start, stop) for start, stop in self._spans(index * self._sequence, last)]
        tokens, counts = (np.concatenate(arrays) for arrays in zip(*windows, strict=True))
        return torch.from_numpy(tokens[:-1]), torch.from_numpy(np.where(counts, tokens, IGNORED)[1:])

    def documents(self, index: int) -> Tensor:
        starts, seen = np.zeros(self._sequence, dtype=np.int64), 0
        for start, stop in self._spans(index * self._sequence, (index + 1) * self._sequence):
            starts[self._opened.tokens.document_starts(start, stop) - start + seen] = 1
            seen += stop - start
        starts[0] = 0
        return torch.from_numpy(starts.cumsum())

    def origin(self, index: int) -> Origin:
        spans = list(self._spans(index * self._sequence, (index + 1) * self._sequence + 1))
        tokens = self._opened.tokens
        documents = document_of(tokens, spans[0][0]), document_of(tokens, spans[-1][1] - 1)
        return Origin(self._opened.name, index, documents)

    def _spans(self, place: int, last: int) -> Iterator[tuple[int, int]]:
        """Where the tokens place..last-1 of this corpus lie in the whole."""
        for number in range(bisect_right(self._ends, place), len(self._ends)):
            before = self._ends[number - 1] if number else 0
            start, stop = place - before, min(last, self._ends[number]) - before
            if start < stop:
                yield self._starts[number] + start, self._starts[number] + stop
                place = before + stop
            if place == last:
                break


class Padded(_Documents):
    """One document per sample, cut when it is longer than the sequence, filled up with labels that do not count."""

    def __init__(self, opened: OpenedSource, vocabulary: int, sequence: int, ranges: Sequence[tuple[int, int]]) -> None:
        super().__init__(opened, vocabulary, sequence, mask_across_documents=False)
        self._firsts = [first for first, _ in ranges]
        self._ends = list(accumulate(last - first for first, last in ranges))
        self.size = self._ends[-1]

    def sample(self, index: int) -> Sample:
        document = self._document(index)
        start, stop = (self._opened.tokens.document_start(document + after) for after in (0, 1))
        tokens, labels = blank(self._sequence)
        if stop - start > 1:
            held, counts = self._window(start, min(stop, start + self._sequence + 1))
            tokens[: len(held) - 1] = torch.from_numpy(held[:-1])
            labels[: len(held) - 1] = torch.from_numpy(np.where(counts, held, IGNORED)[1:])
        return tokens, labels

    def documents(self, index: int) -> Tensor:
        return torch.zeros(self._sequence, dtype=torch.long)

    def origin(self, index: int) -> Origin:
        return Origin(self._opened.name, index, (self._document(index),) * 2)

    def _document(self, index: int) -> int:
        place = bisect_right(self._ends, index)
        return self._firsts[place] + index - (self._ends[place - 1] if place else 0)


class Synthetic:
    """Random tokens in documents of random length, and labels masked. Both rates differ from sample to sample: some are
    one document, some have no label at all."""

    size = 1 << 20

    def __init__(self, vocabulary: int, sequence: int, seed: int) -> None:
        self._vocabulary, self._sequence, self._seed = vocabulary, sequence, seed

    def sample(self, index: int) -> Sample:
        digest, generator = self._draw("synthetic", index)
        window = torch.randint(0, self._vocabulary, (self._sequence + 1,), generator=generator)
        rate = (digest[8] % 5) / 4
        masked = torch.rand(self._sequence, generator=generator) < rate
        return window[:-1], window[1:].masked_fill(masked, IGNORED)

    def documents(self, index: int) -> Tensor:
        digest, generator = self._draw("synthetic documents", index)
        rate = (digest[8] % 4) / 16
        starts = torch.rand(self._sequence, generator=generator) < rate
        starts[0] = False
        return starts.cumsum(0)

    def origin(self, index: int) -> Origin:
        return Origin("synthetic", index)

    def _draw(self, what: str, index: int) -> tuple[bytes, torch.Generator]:
        digest = hashlib.sha256(f"{what}/{self._seed}/{index}".encode()).digest()
        return digest, torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def blank(sequence: int) -> Sample:
    """A sample that counts for nothing."""
    return torch.zeros(sequence, dtype=torch.long), torch.full((sequence,), IGNORED)
