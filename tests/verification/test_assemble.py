"""Whole tensors from the pieces of all ranks: every element exactly once, padding zero, or an error."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cuboid.spec.sharding import Part, Slice
from cuboid.verification.compare import Contribution, assemble

WHOLE = torch.arange(1.0, 36.0).view(7, 5)
"""Seven rows over two ranks: four each, the last one padding."""


def rows(index: int) -> Part:
    return Part("table", (7, 5), Slice(0, 4 * index, min(4 * index + 4, 7), 4, "own", False), 0)


def columns(index: int) -> Part:
    return Part("matrix", (7, 6), Slice(1, 3 * index, 3 * index + 3, 3, "own", False), 0)


def local_rows(index: int) -> Tensor:
    padded = torch.zeros(4, 5)
    real = WHOLE[4 * index : 4 * index + 4]
    padded[: len(real)] = real
    return padded.flatten()


def optimizer_shards(part: Part, values: Tensor, *cuts: int) -> Contribution:
    """The local tensor in parts, as data-parallel ranks hold it."""
    bounds = [0, *cuts, part.size]
    return [(part, start, stop, values[start:stop]) for start, stop in pairwise(bounds)]


def good() -> list[Contribution]:
    return [optimizer_shards(rows(0), local_rows(0), 3, 11), optimizer_shards(rows(1), local_rows(1), 7)]


def test_rows_with_padding_in_any_order() -> None:
    contributions = good()
    assert torch.equal(assemble(contributions)["table"], WHOLE)
    assert torch.equal(assemble([part[::-1] for part in reversed(contributions)])["table"], WHOLE)


def test_columns() -> None:
    matrix = torch.arange(42.0).view(7, 6)
    halves = [optimizer_shards(columns(index), matrix[:, 3 * index : 3 * index + 3].flatten(), 5) for index in range(2)]
    assert torch.equal(assemble(halves)["matrix"], matrix)
    assert torch.equal(assemble([*halves, *good()])["table"], WHOLE)


def test_nothing() -> None:
    assert assemble([[], []]) == {}


def test_a_piece_held_twice() -> None:
    contributions = good()
    contributions[1].append(contributions[0][1])
    with pytest.raises(AssertionError, match="table: elements held by no rank or by several"):
        assemble(contributions)


def test_a_missing_piece() -> None:
    contributions = good()
    del contributions[0][1]
    with pytest.raises(AssertionError, match="table: elements held by no rank or by several"):
        assemble(contributions)


def test_a_piece_held_twice_in_place_of_another() -> None:
    contributions = good()
    contributions[0][2] = contributions[0][0]
    with pytest.raises(AssertionError, match="table: elements held by no rank or by several"):
        assemble(contributions)


def test_a_missing_rank() -> None:
    with pytest.raises(AssertionError, match="table: 20 of 35 elements are held"):
        assemble(good()[:1])


def test_padding_that_is_not_zero() -> None:
    leaking = local_rows(1)
    leaking[-1] = 1e-12
    with pytest.raises(AssertionError, match="table: padding is not zero"):
        assemble([good()[0], optimizer_shards(rows(1), leaking)])


def test_a_rank_with_nothing_but_padding() -> None:
    empty = Part("table", (7, 5), Slice(0, 7, 7, 4, "own", False), 0)
    assert torch.equal(assemble([*good(), optimizer_shards(empty, torch.zeros(20))])["table"], WHOLE)
    with pytest.raises(AssertionError, match="table: padding is not zero"):
        assemble([*good(), optimizer_shards(empty, torch.ones(20))])
