"""The blocks of all context-parallel ranks meet every pair of a query and a key that it sees once, and no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cuboid.model.batch import Documents
from cuboid.parallel.context import by_rank, in_order
from cuboid.parallel.context_blocks import Block, Run, gathered_blocks, ring_blocks, window_blocks
from cuboid.spec.sharding import places_of, seen_places


def seen_pairs(blocks: list[Block], queries: list[int], keys: list[int], counts: Tensor) -> None:
    """Add the pairs of these blocks, in places of the sequence, to (sequences, length, length)."""
    for block in blocks:
        for row in range(*block.rows.indices(len(counts))):
            for place, query in enumerate(queries[block.queries]):
                for number, key in enumerate(keys[block.keys]):
                    if block.causal and number > place:
                        continue
                    if block.since is not None and number < place + block.since:
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


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 26),
    st.lists(st.lists(st.booleans(), min_size=24, max_size=24), min_size=1, max_size=2),
    st.booleans(),
)
def test_every_pair_of_a_window_once(
    size: int, width: int, window: int, starts: list[list[bool]], packed: bool
) -> None:
    """Among keys that were sent for it, and among gathered ones; every query of a block sees a key of it."""
    length = 2 * size * width
    ids = torch.tensor(starts)[:, :length].cumsum(1)
    documents = Documents(ids) if packed else None
    expected = torch.ones(len(ids), length, length, dtype=torch.bool).tril().triu(1 - window)
    if packed:
        expected &= ids.unsqueeze(2) == ids.unsqueeze(1)
    ring, gathered = torch.zeros(len(ids), length, length), torch.zeros(len(ids), length, length)
    for rank in range(size):
        own = places(rank, size, length)
        here = [Run(part, place * width) for place, part in enumerate(places_of(rank, size, length))]
        for source in range(size):
            sent = places_of(rank, size, length)
            if source != rank:
                sent = seen_places(rank, source, size, length, window)
            runs = [Run(part, sum(map(len, sent[:place]))) for place, part in enumerate(sent)]
            blocks = window_blocks(here, runs, window, documents)
            seen_pairs(blocks, own, [place for part in sent for place in part], ring)
            for block in blocks:
                keys, queries = (each.stop - each.start for each in (block.keys, block.queries))
                assert block.since is None or queries - 1 + block.since <= keys - 1
        seen_pairs(gathered_blocks(rank, size, documents, length, window), own, list(range(length)), gathered)
    assert torch.equal(ring, expected.float())
    assert torch.equal(gathered, expected.float())


def test_no_key_is_sent_that_nobody_sees() -> None:
    size, length = 4, 64
    assert [len(part) for part in seen_places(1, 0, size, length, 3)] == [2]
    assert not seen_places(2, 0, size, length, 3)
    sent = sum(
        len(part)
        for one in range(size)
        for other in range(size)
        if one != other
        for part in seen_places(one, other, size, length, 3)
    )
    # Two keys over each border between chunks of different ranks: eight chunks have seven, one of them inside a rank.
    assert sent == 6 * 2


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
