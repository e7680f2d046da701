"""What is called a bad step, and when bad steps are too many."""

from __future__ import annotations

import math

import pytest

from cuboid.errors import UserError
from cuboid.resilience.bad_steps import Judge
from cuboid.spec.run import Run, build_run
from cuboid.spec.train_state import Course


def spec(*fields: str) -> Run:
    table = {"model": "tiny-llama", "checkpoint": {"every": 5}, "output": {"folder": "runs/x"}}
    return build_run(table, [f"resilience.{field}" for field in fields])


def test_a_spike_stands_out_of_the_latest_good_steps() -> None:
    judge = Judge(spec("spike_score=8", "spike_window=32"), Course(), 0)
    for step in range(15):
        assert judge.reason(step, 2.0 + 0.01 * (-1) ** step, 1.0) == ""
    assert judge.reason(15, 100.0, 1.0) == "", "too little is known"
    for step in range(16, 48):
        assert judge.reason(step, 2.0 + 0.01 * (-1) ** step, 1.0 + 0.01 * (-1) ** step) == ""
    assert judge.reason(48, 2.1, 1.0) == "", "within what is usual"
    assert judge.reason(49, 3.0, 1.0).startswith("loss 3 is ")
    assert judge.reason(50, 2.0, 2.0).startswith("gradient norm 2 is ")
    assert judge.reason(51, 0.1, 0.1) == "", "less is no spike"
    assert judge.reason(52, 2.0, math.inf) == "gradient norm is not finite"


def test_numbers_that_hardly_differ_are_no_measure() -> None:
    judge = Judge(spec("spike_score=8", "spike_window=4"), Course(), 0)
    for step in range(4):
        judge.reason(step, 1.0, 1.0)
    assert judge.reason(4, 1.05, 1.0) == ""
    assert judge.reason(5, 1.2, 1.0) == "loss 1.2 is 20.0 deviations above the usual 1"


def test_steps_done_again_are_no_progress() -> None:
    """A run that rolls back does good steps between bad ones for ever."""
    judge = Judge(spec("most_bad_steps=2", "bad_steps=rollback"), Course(), 5)
    for attempt in range(3):
        for step in (5, 6):
            assert judge.reason(step, 1.0, 1.0) == ""
        reason = judge.reason(7, math.nan, 1.0)
        if attempt < 2:
            judge.require_progress(7, reason)
    with pytest.raises(UserError, match=r"^step 8 is bad \(loss is not finite\), as were 2 before it"):
        judge.require_progress(7, reason)
    assert judge.reason(7, 1.0, 1.0) == ""
    judge.require_progress(8, judge.reason(8, math.nan, 1.0))


def test_rolling_back_needs_checkpoints() -> None:
    with pytest.raises(UserError, match=r"^resilience\.bad_steps=rollback has no checkpoints to go back to; use check"):
        build_run({"model": "tiny-llama"}, ["resilience.bad_steps=rollback"])
