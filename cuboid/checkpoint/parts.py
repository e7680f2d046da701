"""One reader of a checkpoint's index: rank 0 reads all of it, and every other rank is told the part that it needs.

All of it has an entry for every chunk of every rank that wrote it; if every rank read that, its bytes would grow with
the square of the ranks."""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cuboid.checkpoint.shards import ShardedTensor
from cuboid.parallel.coordination import Coordination

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
