"""Turns: every check has its turn in each round, rounds become longer where they take too much of the time, and what
looks wrong is looked at again by all checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cuboid.errors import UserError
from cuboid.spec.checks import CHECKS, ChecksSpec
from cuboid.training.checks.turns import BLOCKS, Clock, Look, Turns

SEGMENTS = ["embedding", *(f"layers.{layer}" for layer in range(12)), "head"]


def turns(done: int = 0, **settings: Any) -> Turns:
    stage = SimpleNamespace(segments=[SimpleNamespace(name=name) for name in SEGMENTS])
    engine: Any = SimpleNamespace(pipeline=SimpleNamespace(stages={0: stage}))
    return Turns(engine, ChecksSpec(**{"every": 50, "first": 0} | settings), done)


@pytest.mark.parametrize("every", [1, 3, 7, 50, 500])
@pytest.mark.parametrize("only", ["", "sums,copies", "replay"])
def test_every_check_has_its_turn_in_each_round(every: int, only: str) -> None:
    made = turns(every=every, only=only)
    for begin in range(0, 5 * every, every):
        looks = [made.look(begin + step) for step in range(1, every + 1)]
        names = {name for look in looks if look for name in look.names}
        assert names == set(only.split(",") if only else CHECKS)


def test_blocks_take_turns_and_all_else_is_always_seen() -> None:
    made, seen = turns(), set[str]()
    for step in range(1, 12 // BLOCKS * 50 + 1):
        look = made.look(step)
        if look is not None and "sums" in look.names:
            assert look.blocks is not None and len(look.blocks) == BLOCKS
            seen |= set(look.blocks)
    assert seen == {f"layers.{layer}" for layer in range(12)}
    look = Look(1, frozenset(), ("layers.1",))
    units: dict[str, Any] = {name: SimpleNamespace(name=name) for name in ("head", "layers.1.experts", "layers.11")}
    assert [name for name, unit in units.items() if look.sees(unit)] == ["head", "layers.1.experts"]


def test_the_steps_after_a_start_and_what_looks_wrong_are_looked_at_by_all_checks() -> None:
    made = turns(done=100, first=2)
    looks = [made.look(step) for step in (101, 102, 103)]
    assert looks[0] and looks[1] and looks[0].is_whole and looks[1].is_whole and not looks[2]
    made.look_again(104)
    again = made.look(104)
    assert again and again.is_whole and again.again
    made.start_again(90)
    back = made.look(91)
    assert back and back.is_whole and not back.again


@pytest.mark.parametrize(("seconds", "length"), [(1.04, 50), (1.5, 250)])
def test_rounds_have_as_many_steps_as_keep_checks_below_their_share(seconds: float, length: int) -> None:
    made, clock = turns(), Clock(ChecksSpec(every=50))
    for step in range(1, 1000):
        look = made.look(step)
        clock.note(step, seconds if look else 1.0, look)
        if look and made.begins_with(step):
            made.next_length = clock.next_length()
    assert made.length == pytest.approx(length, abs=1)


def test_a_share_that_is_none_is_refused() -> None:
    for share in (0.0, -0.1, 1.5):
        with pytest.raises(UserError, match=r"checks\.share=.*share=0\.01"):
            ChecksSpec(every=5, share=share)
