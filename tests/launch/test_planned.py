"""Plans are made beside whoever asks for them."""

from __future__ import annotations

import threading
import time

import pytest

from cuboid.errors import UserError
from cuboid.launch.planned import Arranged, Nodes, Planned
from cuboid.resilience.replan import Choice


def choice(nodes: Nodes) -> Arranged:
    return Choice(len(nodes), 1, f"dp={len(nodes)}", ""), nodes


def test_what_is_quick_is_there_at_once_and_kept() -> None:
    asked: list[Nodes] = []

    def arrange(nodes: Nodes) -> Arranged:
        asked.append(nodes)
        return choice(nodes)

    plan = Planned(arrange)
    assert [plan(("a", "b")), plan(("a", "b"))] == 2 * [choice(("a", "b"))]
    assert plan(("a",)) == choice(("a",))
    assert asked == [("a", "b"), ("a",)]


def test_whoever_asks_does_not_wait_for_a_slow_plan() -> None:
    may_end = threading.Event()

    def arrange(nodes: Nodes) -> Arranged:
        assert may_end.wait(60)
        return choice(nodes)

    plan = Planned(arrange)
    begun = time.monotonic()
    assert plan(("a", "b")) is None
    assert time.monotonic() - begun < 30
    may_end.set()
    found = None
    while found is None and time.monotonic() - begun < 60:
        found = plan(("a",))  # a node left meanwhile: the plan for both is of no use
    assert found == choice(("a",))


def test_a_refusal_is_told_each_time() -> None:
    def arrange(nodes: Nodes) -> Arranged:
        raise UserError("no")

    plan = Planned(arrange)
    for _ in range(2):
        with pytest.raises(UserError, match="no"):
            plan(("a",))
