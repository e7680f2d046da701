"""Sources: the sample at each position of the global order, for training and for evaluation. A position is all the
state there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cuboid.data.corpus import Corpus, Fields, OwnDataset, Packed, Padded, Sample, Synthetic, blank
from cuboid.data.mixture import Pattern
from cuboid.data.opened import check_samples, check_vocabulary, is_own, open_source, own_dataset
from cuboid.data.order import sample_at
from cuboid.data.origin import Origin
from cuboid.data.split import split_documents
from cuboid.errors import UserError
from cuboid.spec.run import Run


class Source(Protocol):
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
    """Several sources, each with its share of the positions and an order and epochs of its own."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        self._sources, self.pattern = sources, Pattern(weights)

    def at(self, position: int) -> Sample | Fields:
        source, before = self.pattern.at(position)
        return self._sources[source].at(before)

    def documents_at(self, position: int) -> Tensor:
        source, before = self.pattern.at(position)
        return self._sources[source].documents_at(before)

    def origin(self, position: int) -> Origin | None:
        source, before = self.pattern.at(position)
        return self._sources[source].origin(before)


def make_source(run: Run) -> Source:
    """What the run trains on."""
    sources = [Shuffled(_corpus(run, name), run.training.seed) for name in run.data.sources]
    return sources[0] if len(sources) == 1 else Mixture(sources, list(run.data.weights.values()))


def make_validation_source(run: Run) -> tuple[Source, int]:
    """What the run is evaluated on, and after how many positions all of it has been met."""
    data, training = run.data, run.training
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


def _corpus(run: Run, name: str, held_out: bool = False) -> Corpus:
    data, vocabulary, sequence = run.data, run.model.vocab, run.training.sequence
    if is_own(name):
        return OwnDataset(own_dataset(run, name), name)
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
