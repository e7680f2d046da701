"""The blocks of all context-parallel ranks meet every pair of a query and a key that it sees once, and no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cuboid.model.batch import Documents
from cuboid.parallel.context import Block, by_rank, gathered_blocks, in_order, ring_blocks
from cuboid.spec.sharding import places_of


def seen_pairs(blocks: list[Block], queries: list[int], keys: list[int], counts: Tensor) -> None:
    """Add the pairs of these blocks, in places of the sequence, to (sequences, length, length)."""
    for block in blocks:
        for row in range(*block.rows.indices(len(counts))):
            for place, query in enumerate(queries[block.queries]):
                for number, key in enumerate(keys[block.keys]):
                    if block.causal and number > place:
                        continue
                    if block.documents is not None:
                        ids = block.documents.ids[row]
                        if ids[place] != ids[number]:
                            continue
                    counts[row, query, key] += 1


def places(rank: int, size: int, length: int) -> list[int]:
    return [place for part in places_of(rank, size, length) for place in part]


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.lists(st.booleans(), min_size=24, max_size=24), min_size=1, max_size=2),
    st.booleans(),
)
def test_every_pair_once(size: int, width: int, starts: list[list[bool]], packed: bool) -> None:
    length = 2 * size * width
    ids = torch.tensor(starts)[:, :length].cumsum(1)
    documents = Documents(ids) if packed else None
    expected = torch.ones(len(ids), length, length, dtype=torch.bool).tril()
    if packed:
        expected &= ids.unsqueeze(2) == ids.unsqueeze(1)
    ring, gathered = torch.zeros(len(ids), length, length), torch.zeros(len(ids), length, length)
    for rank in range(size):
        own = places(rank, size, length)
        for source in range(size):
            seen_pairs(ring_blocks(rank, source, size, documents, length), own, places(source, size, length), ring)
        seen_pairs(gathered_blocks(rank, size, documents, length), own, list(range(length)), gathered)
    assert torch.equal(ring, expected.float())
    assert torch.equal(gathered, expected.float())


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_has_the_same_work(size: int) -> None:
    length = 4 * size
    work = set()
    for rank in range(size):
        counts = torch.zeros(1, length, length)
        for source in range(size):
            blocks = ring_blocks(rank, source, size, None, length)
            seen_pairs(blocks, places(rank, size, length), places(source, size, length), counts)
        work.add(int(counts.sum()))
    assert len(work) == 1


def test_what_ranks_hold_comes_back_in_order() -> None:
    size, length = 3, 12
    whole = torch.randn(2, length, 5)
    held = torch.stack([whole[:, places(rank, size, length)] for rank in range(size)])
    assert torch.equal(in_order(held), whole)
    assert torch.equal(by_rank(whole, size), held)
