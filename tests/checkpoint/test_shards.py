"""Runs of flattened elements as slices: every element once, in its place."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as some

from cuboid.checkpoint.shards import slices_of_range, slices_of_shard
from cuboid.spec.sharding import Part, Slice

SHAPES = some.lists(some.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(SHAPES, some.data())
def test_boxes_are_the_run_and_nothing_else(shape: tuple[int, ...], data: some.DataObject) -> None:
    total = prod(shape)
    start = data.draw(some.integers(0, total))
    stop = data.draw(some.integers(start, total))
    tensor = torch.arange(total).view(shape)
    seen: list[int] = []
    for tensor_slice in slices_of_range(shape, start, stop):
        place = tuple(
            slice(o, o + length) for o, length in zip(tensor_slice.offsets, tensor_slice.lengths, strict=True)
        )
        values = tensor[place].flatten().tolist()
        assert values == list(range(tensor_slice.start, tensor_slice.start + tensor_slice.size))
        seen += values
    assert seen == list(range(start, stop))
    assert len(slices_of_range(shape, start, stop)) <= 2 * len(shape)


def test_padding_is_left_out_and_offsets_are_of_the_full_tensor() -> None:
    part = Part("head.output.weight", (5, 4), Slice(0, 3, 5, 3, "own", False), offset=0)
    slices = slices_of_shard(part, 2, 12)
    assert [(tensor_slice.offsets, tensor_slice.lengths, place) for tensor_slice, place in slices] == [
        ((3, 2), (1, 2), 0),
        ((4, 0), (1, 4), 2),
    ]


def test_columns_of_a_row_split_matrix() -> None:
    part = Part("layers.0.feed_forward.down.weight", (2, 8), Slice(1, 4, 8, 4, "own", False), offset=0)
    assert [(tensor_slice.offsets, tensor_slice.lengths) for tensor_slice, _ in slices_of_shard(part, 0, 8)] == [
        ((0, 4), (2, 4))
    ]
