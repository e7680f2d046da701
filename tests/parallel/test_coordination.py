"""Ranks tell each other things over a store: threads, each with a connection of its own to a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from cuboid.parallel import coordination
from cuboid.parallel.coordination import Coordination, subtree

RANKS = 12


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tree of three levels, and values that do not fit into one key."""
    monkeypatch.setattr(coordination, "FAN", 3)
    monkeypatch.setattr(coordination, "LARGEST", 50)
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def on_all(groups: list[Coordination], work: Callable[[Coordination], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


def open_all(store: Any, seconds: float = 30) -> list[Coordination]:
    return [Coordination(store.clone(), rank, RANKS, seconds) for rank in range(RANKS)]


def test_what_is_told_arrives_and_nothing_is_left(store: Any) -> None:
    def talk(group: Coordination) -> Any:
        gathered = group.gather(f"{group.rank} " * 40)
        part = group.scatter([f"for {rank} " * 40 for rank in range(RANKS)] if group.rank == 0 else [])
        told = group.broadcast("x" * 200 if group.rank == 0 else "")
        first = group.agree(f"problem of {group.rank}" if group.rank in (5, 7) else "")
        return gathered, part, told, first, group.agree("")

    groups = open_all(store)
    before = store.num_keys()
    for _ in range(2):
        found = on_all(groups, talk)
        assert found[0][0] == [f"{rank} " * 40 for rank in range(RANKS)]
        assert all(gathered == [] for gathered, *_ in found[1:])
        assert [part for _, part, *_ in found] == [f"for {rank} " * 40 for rank in range(RANKS)]
        assert {rest for *_, told, first, last in found for rest in [(told, first, last)]} == {
            ("x" * 200, "problem of 5", "")
        }
        assert store.num_keys() - before <= 1, "but for what was told last"
        groups = [group.renew() for group in groups]


def test_who_is_not_answered_says_so_and_a_fresh_one_works(store: Any) -> None:
    groups = [group.renew() for group in open_all(store, seconds=1)]

    def all_but_one(group: Coordination) -> str:
        if group.rank == 7:
            return "did not come"
        try:
            return group.agree("")
        except TimeoutError as error:
            return str(error)

    found = on_all(groups, all_but_one)
    assert all("did not come" in said for said in found)
    again = [group.renew() for group in groups]
    assert on_all(again, lambda group: group.agree("problem" if group.rank == 7 else "")) == ["problem"] * RANKS


def test_every_rank_is_below_one_other() -> None:
    for size in (1, 2, 33, 34, 1057, 1058):
        assert sorted(subtree(0, size)) == list(range(size))
        below = [rank for child in Coordination(None, 0, size, 1).children for rank in subtree(child, size)]
        assert sorted([0, *below]) == list(range(size))


def test_alone_a_rank_needs_no_store() -> None:
    alone = Coordination(None, 0, 1, 1)
    assert alone.gather("a") == ["a"]
    assert alone.scatter(["b"]) == "b"
    assert alone.broadcast("c") == "c"
    assert alone.renew().agree("d") == "d"
