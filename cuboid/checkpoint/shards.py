"""Sharded tensors: a run of elements of a flattened tensor as slices of the full one, which is what a checkpoint
stores.

>>> slices_of_range((3, 4), 2, 9)
[TensorSlice(offsets=(0, 2), lengths=(1, 2), start=2), TensorSlice(offsets=(1, 0), lengths=(1, 4), start=4), \
TensorSlice(offsets=(2, 0), lengths=(1, 1), start=8)]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

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
