"""The rules for copies in memory: who keeps whose, and what is left when nodes are gone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cuboid.checkpoint.memory.nodes import Generation, Held, holders, known, missing, peers, ranks_by_node, transfers

NODES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)
"""The node of each rank."""


def file_of(rank: int) -> str:
    return f"data-{rank:05d}.bin"


def kept_by(nodes: list[str]) -> dict[str, frozenset[str]]:
    """Node -> the files it has when a state is kept."""
    chosen = peers(nodes)
    places = [(node, rank) for rank, node in enumerate(nodes)]
    places += [(nodes[checkpointer], rank) for rank, checkpointer in enumerate(chosen) if checkpointer is not None]
    files = {node: {file_of(rank) for at, rank in places if at == node} for node in nodes}
    return {node: frozenset(held) for node, held in files.items()}


@given(NODES)
def test_a_copy_lies_on_another_node_and_the_work_is_shared(nodes: list[str]) -> None:
    chosen = peers(nodes)
    if len(set(nodes)) == 1:
        assert chosen == [None] * len(nodes)
        return
    assert all(
        checkpointer is not None and nodes[checkpointer] != nodes[rank] for rank, checkpointer in enumerate(chosen)
    )
    sizes = Counter(nodes)
    most = max(Counter(chosen).values())
    assert most <= -(-max(sizes.values()) // min(sizes.values()))


def test_equal_nodes_in_order_keep_those_of_the_one_before() -> None:
    assert peers(list("aaabbbccc")) == [3, 4, 5, 6, 7, 8, 0, 1, 2]


@given(NODES, st.data())
def test_any_one_node_may_be_lost(nodes: list[str], data: st.DataObject) -> None:
    kept, generation = kept_by(nodes), Generation(7, "x")
    gone = data.draw(st.sampled_from(nodes))
    left = {node: {generation: Held(len(nodes), files)} for node, files in kept.items() if node != gone}
    if left:
        assert missing(left, generation) == []


@given(NODES, st.data())
def test_a_state_is_whole_exactly_when_each_part_has_a_holder(nodes: list[str], data: st.DataObject) -> None:
    """Over made-up holdings of several generations, two of one step among them."""
    generations = [Generation(step, digest) for step, digest in ((3, "a"), (5, "a"), (5, "b"), (9, "a"))]
    expected = frozenset(map(file_of, range(len(nodes))))
    some = st.frozensets(st.sampled_from(sorted(expected)))
    holdings = {
        node: {one: Held(len(nodes), data.draw(some)) for one in generations if data.draw(st.booleans())}
        for node in set(nodes)
    }
    seen = known(holdings, newest=5)
    assert seen == sorted(seen, reverse=True) and all(one.step <= 5 for one in seen)
    assert set(seen) == {one for held in holdings.values() for one in held if one.step <= 5}
    for one in seen:
        there = {file for held in holdings.values() if one in held for file in held[one].present}
        assert missing(holdings, one) == sorted(expected - there)


@given(NODES, st.data())
def test_transfers_bring_every_node_what_it_needs(nodes: list[str], data: st.DataObject) -> None:
    files = [file_of(rank) for rank in range(5)]
    generation, by_node = Generation(1, "x"), ranks_by_node(nodes)
    present = {node: set(data.draw(st.frozensets(st.sampled_from(files)))) for node in by_node}
    for file in files:  # somebody has it
        present[data.draw(st.sampled_from(nodes))].add(file)
    holdings = {node: {generation: Held(len(files), frozenset(held))} for node, held in present.items()}
    needed = {node: frozenset(data.draw(st.frozensets(st.sampled_from(files)))) for node in by_node}
    plan = transfers(nodes, needed, holders(holdings, generation))
    for transfer in plan:
        assert transfer.file in holdings[nodes[transfer.source]][generation].present, "who sends it has it"
        assert transfer.file not in present[nodes[transfer.target]], "and nothing is sent twice"
        present[nodes[transfer.target]].add(transfer.file)
    assert all(needed[node] <= present[node] for node in by_node)
    sends = Counter(transfer.target for transfer in plan)
    for ranks in by_node.values():
        assert max(sends[rank] for rank in ranks) - min(sends[rank] for rank in ranks) <= max(1, len(files))
