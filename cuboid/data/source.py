"""Sources: the sample at each position of the global order, for training and for evaluation. A position is all the
state there is.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cuboid.data.corpus import Corpus, Fields, Origin, Packed, Padded, Sample, Synthetic, blank
from cuboid.data.opened import check_samples, check_vocabulary, is_own, make_own, open_source, split_documents
from cuboid.data.own import OwnDataset, Stream, first_samples, has_length
from cuboid.errors import UserError
from cuboid.spec.run import Run

# The global order of samples: a keyed permutation per epoch, computed, never stored.
#
# Position n of the whole training (step · global batch + place in the batch) decides the sample; nothing else is
# state.


ROUNDS = 6


def permuted(index: int, size: int, key: str) -> int:
    """A bijection of 0..size-1: a Feistel network over the next even power of two, walked until it lands inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def sample_at(position: int, size: int, seed: int) -> int:
    """Which of `size` samples stands at a position of the global order; each epoch meets each sample once."""
    epoch, index = divmod(position, size)
    return permuted(index, size, f"{seed}/{epoch}")


# Which of several sources stands at a position of the global order: decided by the weights, computed from a table of
# one period.
#
# After any number N of positions each source has its weight of them, to less than one sample either way.


LONGEST_PERIOD = 100_000


class Pattern:
    """The sources of one period, whose length is the least in which every weight is a whole number of samples."""

    def __init__(self, weights: Sequence[float]) -> None:
        counts = _whole_weights(weights)
        self.period = sum(counts)
        self._counts = counts
        order = np.array(_order(counts), dtype=np.int32)
        self._order = order
        self._before = np.empty(len(order), dtype=np.int64)
        for source in range(len(counts)):
            places = np.flatnonzero(order == source)
            self._before[places] = np.arange(len(places))

    def at(self, position: int) -> tuple[int, int]:
        """The source at a position, and how many positions it had before."""
        period, place = divmod(position, self.period)
        source = int(self._order[place])
        return source, period * self._counts[source] + int(self._before[place])

    def positions(self, sizes: Sequence[int]) -> int:
        """After how many positions every source has had as many as `sizes` says."""
        return max(-(-size // count) for size, count in zip(sizes, self._counts, strict=True)) * self.period


def _whole_weights(weights: Sequence[float]) -> list[int]:
    # A weight is the decimal number its owner wrote, not the binary one beside it.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    common = math.gcd(*counts)
    counts = [count // common for count in counts]
    if sum(counts) > LONGEST_PERIOD:
        total = sum(counts)
        rounded = ", ".join(f"{max(round(count / total, 4), 0.0001)}" for count in counts)
        raise UserError(
            f"data.mixture has weights {', '.join(map(str, weights))}, which are whole numbers of samples only after "
            f"{total:,}; use rounder ones, like {rounded}"
        )
    return counts


def _order(counts: list[int]) -> list[int]:
    """Gives each place to the source that must have it soonest, among those that may have it.

    Sample k of a source with s of n places may not come before place k·n/s (rounded down), lest the source be a whole
    sample ahead, and must come before place (k+1)·n/s (rounded up), lest it be a whole sample behind. That the
    earliest-deadline order keeps all these promises is a theorem on fair schedules (Baruah et al., 1996)."""
    period = sum(counts)
    waiting = [(0, source, 0) for source in range(len(counts))]
    ready: list[tuple[int, int, int]] = []
    order = []
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, sample = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(sample + 1) * period // counts[source]), source, sample))
        _, source, sample = heapq.heappop(ready)
        order.append(source)
        if sample + 1 < counts[source]:
            heapq.heappush(waiting, ((sample + 1) * period // counts[source], source, sample + 1))
    return order


class Source(Protocol):
    def __hash__(self) -> int: ...

    def at(self, position: int) -> Sample | Fields: ...

    def documents_at(self, position: int) -> Tensor:
        """Which document each token of the sample belongs to."""
        ...

    def origin(self, position: int) -> Origin | None:
        """Where the sample comes from; None for one that counts for nothing."""
        ...


class Shuffled:
    """Every sample of a corpus once in each epoch, in an order of that epoch's own."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self._seed = corpus, seed

    def at(self, position: int) -> Sample | Fields:
        return self.corpus.sample(sample_at(position, self.corpus.size, self._seed))

    def documents_at(self, position: int) -> Tensor:
        return self.corpus.documents(sample_at(position, self.corpus.size, self._seed))

    def origin(self, position: int) -> Origin | None:
        return self.corpus.origin(sample_at(position, self.corpus.size, self._seed))


class HeldOut:
    """Every sample of a corpus once, then samples that count for nothing."""

    def __init__(self, corpus: Corpus, seed: int, sequence: int) -> None:
        self.corpus, self._seed, self._sequence = corpus, seed, sequence

    def at(self, position: int) -> Sample | Fields:
        if position >= self.corpus.size:
            return blank(self._sequence)
        return self.corpus.sample(sample_at(position, self.corpus.size, self._seed))

    def documents_at(self, position: int) -> Tensor:
        if position >= self.corpus.size:
            return torch.zeros(self._sequence, dtype=torch.long)
        return self.corpus.documents(sample_at(position, self.corpus.size, self._seed))

    def origin(self, position: int) -> Origin | None:
        if position >= self.corpus.size:
            return None
        return self.corpus.origin(sample_at(position, self.corpus.size, self._seed))


class Mixture:
    """Several sources, each with its weight of the positions and an order and epochs of its own."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        self.sources, self.pattern = sources, Pattern(weights)

    def at(self, position: int) -> Sample | Fields:
        source, before = self.pattern.at(position)
        return self.sources[source].at(before)

    def documents_at(self, position: int) -> Tensor:
        source, before = self.pattern.at(position)
        return self.sources[source].documents_at(before)

    def origin(self, position: int) -> Origin | None:
        source, before = self.pattern.at(position)
        return self.sources[source].origin(before)


def check_whole(source: Source) -> None:
    """Refuse to read what was cut short since it was opened; of what is no file there is nothing to say."""
    for each in source.sources if isinstance(source, Mixture) else (source,):
        if isinstance(each, Shuffled | HeldOut) and isinstance(each.corpus, Packed | Padded):
            each.corpus.check_whole()


def make_source(run: Run) -> Source:
    """What the run trains on."""
    sources = [_source(run, name) for name in run.data.sources]
    return sources[0] if len(sources) == 1 else Mixture(sources, list(run.data.weights.values()))


def _source(run: Run, name: str) -> Source:
    if is_own(name):
        make = make_own(run, name)
        dataset = make()
        if not has_length(dataset):
            return Stream(make, name, 2 * run.training.global_batch)
        return Shuffled(OwnDataset(dataset, name), run.training.seed)
    return Shuffled(_corpus(run, name), run.training.seed)


def make_validation_source(run: Run) -> tuple[Source, int]:
    """What the run is evaluated on, and after how many positions all of it has been met."""
    data, training = run.data, run.training
    if is_own(data.validation):
        corpus = _own_validation(run)
        return Shuffled(corpus, training.seed), corpus.size
    if data.validation:
        held = [HeldOut(_corpus(run, data.validation), training.seed, training.sequence)]
    elif data.validation_fraction:
        corpora = [_corpus(run, name, held_out=True) for name in data.sources]
        held = [HeldOut(corpus, training.seed, training.sequence) for corpus in corpora]
    else:
        raise UserError("data has no held-out part; use data.validation_fraction=0.01 or name data.validation")
    if len(held) == 1:
        return held[0], held[0].corpus.size
    mixture = Mixture(held, list(data.weights.values()))
    return mixture, mixture.pattern.positions([source.corpus.size for source in held])


def _own_validation(run: Run) -> OwnDataset:
    """Of a stream as many samples as an evaluation takes. Nothing that counts for nothing can be made up for data of
    one's own, so the last batch must be whole."""
    name, batch = run.data.validation, run.training.global_batch
    wanted = run.evaluation.batches * batch
    dataset = make_own(run, name, held_out=True)()
    held = dataset if has_length(dataset) else first_samples(dataset, wanted)
    corpus = OwnDataset(held, name, getattr(dataset, "collate", None))
    if corpus.size % batch and corpus.size < wanted:
        whole = corpus.size // batch
        instead = f"evaluation.batches={whole}" if whole else f"{batch} samples or more"
        raise UserError(
            f"data.validation={name} has {corpus.size} samples, which is no whole number of global batches of {batch}; "
            f"use {instead}"
        )
    return corpus


def _corpus(run: Run, name: str, held_out: bool = False) -> Corpus:
    data, vocabulary, sequence = run.data, run.model.vocab, run.training.sequence
    if name == "synthetic":
        return Synthetic(vocabulary, sequence, run.training.seed)
    opened = open_source(name)
    fraction = data.validation_fraction if name in data.sources else 0.0
    split = split_documents(opened.tokens.documents, fraction, name)
    if opened.vocabulary is not None:
        check_vocabulary(run, opened)
    check_samples(run, opened, split)
    ranges = split.held_out if held_out else split.training
    if data.packing == "padded":
        return Padded(opened, vocabulary, sequence, ranges)
    return Packed(opened, vocabulary, sequence, ranges, data.mask_across_documents)
