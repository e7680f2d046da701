"""Learning rates: warm-up, the three schedules, and where each of them ends."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.spec.run import Run, build_run
from cuboid.spec.training import LearningRateSpec
from cuboid.training.learning_rate import learning_rate, tell_change

SCHEDULES = ("cosine", "wsd", "constant")


def rates(steps: int, **fields: Any) -> list[float]:
    spec = LearningRateSpec(**{"peak": 1.0, **fields})
    return [learning_rate(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_never_zero(schedule: str) -> None:
    found = rates(40, schedule=schedule, warmup_steps=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_step_has_the_peak(schedule: str) -> None:
    assert rates(10, schedule=schedule, peak=3e-4)[0] == pytest.approx(3e-4)


def test_constant_stays() -> None:
    assert rates(7, schedule="constant") == [1.0] * 7


def test_cosine() -> None:
    found = rates(11, schedule="cosine", minimum_ratio=0.2)
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(11)]
    assert found == pytest.approx(expected)
    assert (found[0], found[5], found[10]) == pytest.approx((1.0, 0.6, 0.2))


def test_cosine_starts_where_warm_up_ends() -> None:
    found = rates(15, schedule="cosine", warmup_steps=4, minimum_ratio=0.0)
    assert found[3:5] == pytest.approx([1.0, 1.0])
    assert found[9] == pytest.approx(0.5)
    assert found[14] == pytest.approx(0.0, abs=1e-12)


def test_wsd_stays_and_decays_over_the_last_fifth() -> None:
    found = rates(20, schedule="wsd", warmup_steps=2, minimum_ratio=0.2)
    assert found[:2] == pytest.approx([0.5, 1.0])
    assert found[2:16] == pytest.approx([1.0] * 14)
    assert found[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_wsd_decays_as_long_as_it_is_told() -> None:
    found = rates(10, schedule="wsd", decay_steps=5, minimum_ratio=0.0)
    assert found == pytest.approx([1.0] * 5 + [0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(10, schedule="wsd", decay_steps=1, minimum_ratio=0.1) == pytest.approx([1.0] * 9 + [0.1])


def test_a_decay_longer_than_what_warm_up_leaves_starts_at_its_end() -> None:
    found = rates(6, schedule="wsd", warmup_steps=2, decay_steps=100, minimum_ratio=0.0)
    assert found == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


@given(
    schedule=st.sampled_from(["cosine", "wsd"]),
    steps=st.integers(2, 60),
    warmup=st.integers(0, 70),
    decay=st.integers(0, 70),
    ratio=st.floats(0, 1),
)
def test_rates_rise_to_the_peak_and_fall_to_the_minimum(
    schedule: str, steps: int, warmup: int, decay: int, ratio: float
) -> None:
    found = rates(steps, schedule=schedule, warmup_steps=warmup, decay_steps=decay, minimum_ratio=ratio)
    assert all(0 <= rate <= 1 + 1e-12 for rate in found)
    assert all(after > before for before, after in pairwise(found[:warmup]))
    falling = found[max(0, warmup - 1) :]
    assert all(after <= before + 1e-12 for before, after in pairwise(falling))
    if warmup <= steps - 2:
        assert found[-1] == pytest.approx(ratio, abs=1e-12)


def saved_and_resumed(before: list[str], now: list[str]) -> tuple[Run, Run]:
    return tuple(build_run({"model": "tiny-llama"}, overrides) for overrides in (before, now))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        ("cosine", "the cosine schedule ends at the last step as it is now"),
        ("wsd", "the decay ends at the last step as it is now"),
        ("constant", "the schedule is constant"),
    ],
)
def test_more_steps_say_what_becomes_of_the_learning_rate(schedule: str, way: str) -> None:
    same = f"learning_rate.schedule={schedule}"
    old, new = saved_and_resumed([same, "training.steps=100"], [same, "training.steps=200"])
    last = learning_rate(old.learning_rate, 99, 100)
    following = learning_rate(new.learning_rate, 100, 200)
    assert tell_change(old, new, 100) == (
        f"training.steps=200 (was 100): {way}; the learning rate of step 100 was {last:.3g}, "
        f"of step 101 it is {following:.3g}"
    )


def test_another_peak_is_said_and_nothing_is_said_of_what_stays() -> None:
    old, new = saved_and_resumed(["learning_rate.peak=1e-3"], ["learning_rate.peak=1e-2", "layout=dp=2"])
    assert tell_change(old, new, 50).startswith("learning_rate.peak=0.01 (was 0.001): the cosine")
    assert tell_change(old, old, 50) == ""
    assert tell_change(old, new, 100) == "", "all steps are done"
