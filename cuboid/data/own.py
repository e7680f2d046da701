"""Data sets of one's own: map-style ones, which have a length and a sample at each index, and streams, which can only
be iterated. Both are deterministic, so a position is all the state there is: a stream is brought there by counting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from cuboid.data.corpus import Fields, Origin, Sample
from cuboid.errors import UserError

Collate = Callable[[list[Any]], Mapping[str, Any]]
"""Samples as the data set gives them -> a micro-batch of them."""


def has_length(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def tensors_of(found: Any, name: str, place: int, collate: Collate | None) -> Sample | Fields:
    """A sample as the engine takes it. With a collator it is a micro-batch of one, without its first dimension."""
    if collate is not None:
        return {str(key): torch.as_tensor(value)[0] for key, value in collate([found]).items()}
    if isinstance(found, tuple | list) and len(found) == 2:
        return torch.as_tensor(found[0]), torch.as_tensor(found[1])
    if isinstance(found, Mapping):
        return {str(key): torch.as_tensor(value) for key, value in found.items()}
    raise UserError(
        f"data.source={name} gives {type(found).__name__} at {place}; it must be a dict of tensors or a pair "
        "(tokens, labels), or the data set must have `collate(samples)`"
    )


def one_document(sample: Sample | Fields) -> Tensor:
    """Of a data set that knows no documents; `make_own` refuses it where attention must stay inside them."""
    tokens = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
    return torch.zeros_like(tokens, dtype=torch.long)


class OwnDataset:
    """`len(dataset)` samples, each a dict of tensors or a pair (tokens, labels), or what `dataset.collate` takes."""

    def __init__(self, dataset: Any, name: str, collate: Collate | None = None) -> None:
        self._dataset, self._name = dataset, name
        self._collate = collate or getattr(dataset, "collate", None)
        self.size = len(dataset)
        if not self.size:
            raise UserError(f"data.source={name} has no samples; give it one at least")

    def sample(self, index: int) -> Sample | Fields:
        return tensors_of(self._dataset[index], self._name, index, self._collate)

    def documents(self, index: int) -> Tensor:
        return one_document(self.sample(index))

    def origin(self, index: int) -> Origin:
        return Origin(self._name, index)


class Stream:
    """A source over whatever can be iterated, in its own order, again and again.

    Every rank iterates all of it and takes the samples at its positions: a change of layout loses and repeats none. To
    begin far inside, `dataset.skip(n)` is used where there is one, as streams of Hugging Face have; else samples are
    read and let go."""

    def __init__(self, make: Callable[[], Any], name: str, recent: int) -> None:
        """`make`: the data set, anew at each call. `recent`: so many samples are kept, to be asked for again."""
        self._make, self._name, self._recent = make, name, recent
        self._seen: OrderedDict[int, Sample | Fields] = OrderedDict()
        self._size: int | None = None
        """Samples of an epoch, once its end has been met."""
        self._begin(0)

    def _begin(self, position: int) -> None:
        """Let the next sample be the one at `position`."""
        epoch = position // self._size if self._size else 0
        into = position - epoch * (self._size or 0)
        dataset = self._make()
        if not hasattr(dataset, "__iter__"):
            raise UserError(
                f"data.source={self._name} is {type(dataset).__name__}; give it `__len__` and `__getitem__`, or "
                "`__iter__`"
            )
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._collate: Collate | None = getattr(dataset, "collate", None)
        self._has_read = False
        self._epoch_begin, self._next = position - into, position - into
        if into and hasattr(dataset, "skip"):
            dataset, self._next = dataset.skip(into), position
        self._iterator: Iterator[Any] = iter(dataset)

    def _take(self) -> Any:
        """The next sample, of the next epoch if this one is over."""
        for found in self._iterator:
            self._next += 1
            self._has_read = True
            return found
        size = self._next - self._epoch_begin
        if not self._has_read:  # skipped beyond its end, wherever that is
            size = sum(1 for _ in self._make())
        if not size:
            raise UserError(f"data.source={self._name} has no samples; give it one at least")
        if self._size not in (None, size):
            raise UserError(
                f"data.source={self._name} had {self._size} samples and has {size}; give all epochs as many"
            )
        self._size = size
        self._begin(self._next)
        return self._take()

    def at(self, position: int) -> Sample | Fields:
        if position in self._seen:
            return self._seen[position]
        # Far ahead with `skip`, or behind what is remembered, it is quicker or needed to begin anew.
        if position < self._next or (position > self._next + self._recent and self._skips):
            self._begin(position)
        while self._next < position:
            self._take()
        found = self._take()  # may begin another epoch, and only then is the collator known
        self._seen[position] = tensors_of(found, self._name, position, self._collate)
        if len(self._seen) > self._recent:
            self._seen.popitem(last=False)
        return self._seen[position]

    @property
    def _skips(self) -> bool:
        return hasattr(self._make(), "skip")

    def documents_at(self, position: int) -> Tensor:
        return one_document(self.at(position))

    def origin(self, position: int) -> Origin | None:
        return Origin(self._name, position)


def first_samples(dataset: Any, count: int) -> list[Any]:
    return list(islice(iter(dataset), count))


def check_stream(make: Callable[[], Any], name: str) -> None:
    """Refuse a stream that has no samples, or others each time it is begun."""
    one, other = (Stream(make, name, 1).at(0) for _ in range(2))
    if not _equal(one, other):
        raise UserError(
            f"data.source={name} begins with another sample each time: resuming would lose some and repeat others; "
            "draw its random numbers from a seed of its own"
        )


def _equal(one: Sample | Fields, other: Sample | Fields) -> bool:
    first, second = (list(each.values()) if isinstance(each, dict) else list(each) for each in (one, other))
    return len(first) == len(second) and all(map(torch.equal, first, second))
