"""Sharded tensors: a run of elements of a flattened tensor as slices of the full one, which is what a checkpoint
stores; and which chunks of a checkpoint a rank's slices touch.

>>> slices_of_range((3, 4), 2, 9)
[TensorSlice(offsets=(0, 2), lengths=(1, 2), start=2), TensorSlice(offsets=(1, 0), lengths=(1, 4), start=4), \
TensorSlice(offsets=(2, 0), lengths=(1, 1), start=8)]
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from cuboid.parallel.coordination import Coordination
from cuboid.spec.sharding import Part


@dataclass(frozen=True)
class TensorSlice:
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    """Where its first element stands in the flattened tensor; the others follow it without a gap."""

    @property
    def size(self) -> int:
        return prod(self.lengths)


def slices_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[TensorSlice]:
    """Whole slabs of the first dimension in one slice, the ragged ends one dimension further down."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [TensorSlice((start,), (stop - start,), start)]
    slab = prod(shape[1:])
    first, last = -(-start // slab), stop // slab
    if first > last:  # inside one slab
        return _inside(shape, start // slab, start, stop)
    slices = _inside(shape, first - 1, start, first * slab) if start < first * slab else []
    if first < last:
        rest = (0,) * (len(shape) - 1)
        slices.append(TensorSlice((first, *rest), (last - first, *shape[1:]), first * slab))
    return slices + (_inside(shape, last, last * slab, stop) if last * slab < stop else [])


def _inside(shape: tuple[int, ...], slab_index: int, start: int, stop: int) -> list[TensorSlice]:
    base = slab_index * prod(shape[1:])
    inner = slices_of_range(shape[1:], start - base, stop - base)
    return [
        TensorSlice((slab_index, *tensor_slice.offsets), (1, *tensor_slice.lengths), tensor_slice.start + base)
        for tensor_slice in inner
    ]


def slices_of_shard(part: Part, start: int, stop: int) -> list[tuple[TensorSlice, int]]:
    """Slices of the full parameter for elements `start:stop` of a rank's part, each with its place among those
    elements.

    Padding, which only a split vocabulary has, lies behind the real rows and is skipped."""
    cut = part.slice
    real = cut.stop - cut.start
    if real < cut.length:
        stop = min(stop, real * prod(part.shape[1:]))
    result = []
    for tensor_slice in slices_of_range(part.shape, start, stop):
        offsets = tuple(
            offset + (cut.start if dimension == cut.dimension else 0)
            for dimension, offset in enumerate(tensor_slice.offsets)
        )
        result.append((TensorSlice(offsets, tensor_slice.lengths, tensor_slice.start), tensor_slice.start - start))
    return result


@dataclass(frozen=True)
class ShardedTensor:
    """A full tensor of which this rank holds some slices, to be saved or filled."""

    full_shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[tuple[TensorSlice, Tensor], ...]
    """Each slice with its values, a view of what the rank really holds, so that loading fills it in place."""
    near: tuple[Tensor, ...] = ()
    """Of halved values: `slices` hold the rest, these what it is the rest of. Such can be saved, not filled."""


# One reader of a checkpoint's index: rank 0 reads all of it, and every other rank is told the part that it needs.
#
# All of it has an entry for every chunk of every rank that wrote it; if every rank read that, its bytes would grow with
# the square of the ranks.


Index = dict[str, Any]
Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths of a slice."""


def extents(state: Mapping[str, ShardedTensor]) -> dict[str, list[Extent]]:
    return {
        name: [(tensor_slice.offsets, tensor_slice.lengths) for tensor_slice, _ in held.slices]
        for name, held in state.items()
    }


class Finder:
    """Finds the chunks of a tensor that a slice touches without looking at all of them."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self._chunks = sorted(entry["chunks"], key=lambda chunk: chunk["offsets"])
        self._starts = [chunk["offsets"][0] for chunk in self._chunks]
        self._longest = max((chunk["lengths"][0] for chunk in self._chunks), default=0)

    def touched(self, slices: Iterable[Extent]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for offsets, lengths in slices:
            first = bisect_right(self._starts, offsets[0] - self._longest)
            last = bisect_left(self._starts, offsets[0] + lengths[0])
            for number in range(first, last):
                if _overlap(self._chunks[number], offsets, lengths):
                    found[number] = self._chunks[number]
        return [found[number] for number in sorted(found)]


def _overlap(chunk: dict[str, Any], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    return all(
        there < offset + length and offset < there + extent
        for there, extent, offset, length in zip(chunk["offsets"], chunk["lengths"], offsets, lengths, strict=True)
    )


def parts_of(index: Index, wanted: Iterable[bytes]) -> list[Index]:
    """For each rank the part of the index that its `Wishes` need; ranks that want the same get the same object."""
    finders: dict[str, Finder] = {}
    known: dict[bytes, Index] = {}
    result = []
    for wish in wanted:
        if wish not in known:
            part: Index = {}
            for name, slices in pickle.loads(wish).items():
                if name in index:
                    if name not in finders:
                        finders[name] = Finder(index[name])
                    part[name] = {**index[name], "chunks": finders[name].touched(slices)}
            known[wish] = part
        result.append(known[wish])
    return result


class Wishes:
    """What every rank will read, told to rank 0 once, when it is first needed. Every rank calls the same methods."""

    def __init__(self, group: Coordination, state: Callable[[], Mapping[str, ShardedTensor]]) -> None:
        self._group, self._state = group, state
        self._wanted: list[bytes] | None = None

    def part(self, index: Index) -> Index:
        """This rank's part of the `index` that rank 0 has."""
        if self._wanted is None:
            self._wanted = self._group.gather(pickle.dumps(extents(self._state())))
        return self._group.scatter(parts_of(index, self._wanted))
