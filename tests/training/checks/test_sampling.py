"""Sampling: every check runs in each round, rounds become longer where checks take too much of the time, and after a
step that seems wrong all checks run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cuboid.errors import UserError
from cuboid.spec.checks import CHECKS, ChecksSpec
from cuboid.training.checks.sampling import BLOCKS, CheckTimer, SampledStep, Sampling

SEGMENTS = ["embedding", *(f"layers.{layer}" for layer in range(12)), "head"]


def sampling(done: int = 0, **settings: Any) -> Sampling:
    stage = SimpleNamespace(segments=[SimpleNamespace(name=name) for name in SEGMENTS])
    engine: Any = SimpleNamespace(pipeline=SimpleNamespace(stages={0: stage}))
    return Sampling(engine, ChecksSpec(**{"every": 50, "first": 0} | settings), done)


@pytest.mark.parametrize("every", [1, 3, 7, 50, 500])
@pytest.mark.parametrize("only", ["", "sums,copies", "replay"])
def test_every_check_runs_in_each_round(every: int, only: str) -> None:
    made = sampling(every=every, only=only)
    for begin in range(0, 5 * every, every):
        steps = [made.at(begin + step) for step in range(1, every + 1)]
        names = {name for sampled in steps if sampled for name in sampled.names}
        assert names == set(only.split(",") if only else CHECKS)


def test_rounds_take_the_blocks_one_after_another_and_always_all_else() -> None:
    made, seen = sampling(), set[str]()
    for step in range(1, 12 // BLOCKS * 50 + 1):
        sampled = made.at(step)
        if sampled is not None and "sums" in sampled.names:
            assert sampled.blocks is not None and len(sampled.blocks) == BLOCKS
            seen |= set(sampled.blocks)
    assert seen == {f"layers.{layer}" for layer in range(12)}
    sampled = SampledStep(1, frozenset(), ("layers.1",))
    units: dict[str, Any] = {name: SimpleNamespace(name=name) for name in ("head", "layers.1.experts", "layers.11")}
    assert [name for name, unit in units.items() if sampled.includes(unit)] == ["head", "layers.1.experts"]


def test_all_checks_run_after_a_start_and_after_a_step_that_seems_wrong() -> None:
    made = sampling(done=100, first=2)
    steps = [made.at(step) for step in (101, 102, 103)]
    assert steps[0] and steps[1] and steps[0].covers_all and steps[1].covers_all and not steps[2]
    made.repeat_at(104)
    again = made.at(104)
    assert again and again.covers_all and again.repeats
    made.start_again(90)
    back = made.at(91)
    assert back and back.covers_all and not back.repeats


@pytest.mark.parametrize(("seconds", "length"), [(1.04, 50), (1.5, 250)])
def test_rounds_have_as_many_steps_as_keep_checks_below_their_share(seconds: float, length: int) -> None:
    made, timer = sampling(), CheckTimer(ChecksSpec(every=50))
    for step in range(1, 1000):
        sampled = made.at(step)
        timer.note(step, seconds if sampled else 1.0, sampled)
        if sampled and made.is_first_of_round(step):
            made.next_length = timer.next_length()
    assert made.length == pytest.approx(length, abs=1)


def test_a_share_that_is_none_is_refused() -> None:
    for share in (0.0, -0.1, 1.5):
        with pytest.raises(UserError, match=r"checks\.share=.*share=0\.01"):
            ChecksSpec(every=5, share=share)
