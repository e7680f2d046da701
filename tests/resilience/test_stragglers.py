"""The rank that others wait for is told from theirs by what its steps are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.resilience.stragglers import StepTimes, Stragglers, read_slowest, slowest, step_times
from cuboid.spec.layout import Layout
from cuboid.telemetry.heartbeat import Reading


def reading(rank: int, step: int, *, own: float, data: float, total: float) -> Reading:
    """After so many steps of `total` seconds each."""
    return Reading(
        rank,
        1 + rank,
        "step",
        step,
        waited=step * (total - own - data),
        read=step * data,
        spent={"step": step * total, "save": step * 0.1},
    )


def test_a_step_is_taken_apart() -> None:
    before = [reading(0, 10, own=0.2, data=0.1, total=1.0)]
    after = [reading(0, 30, own=0.2, data=0.1, total=1.0)]
    (share,) = step_times(before, after)
    assert (share.compute, share.wait, share.data, share.save) == pytest.approx((0.2, 0.7, 0.1, 0.1))
    assert step_times(after, before) == [], "ranks that went back are looked at anew"


@given(
    st.lists(st.floats(0.1, 0.14), min_size=8, max_size=8),
    st.integers(0, 7),
    st.sampled_from(["compute", "data"]),
    st.floats(0.1, 1.0),
)
def test_the_slow_rank_and_its_reason_are_named(own: list[float], rank: int, why: str, more: float) -> None:
    found = []
    for one, compute in enumerate(own):
        extra = more if one == rank else 0.0
        computes, reads = (compute + extra, 0.01) if why == "compute" else (compute, 0.01 + extra)
        found.append(StepTimes(one, computes, 2 - computes - reads, reads, 0.0))
    worst = slowest(found, Layout(dp=4, pp=2))
    assert worst is not None
    assert (worst.rank, worst.because) == (rank, why)
    assert worst.ratio > 1.3


def test_stages_are_not_compared_with_each_other() -> None:
    found = [
        StepTimes(0, 0.1, 0.9, 0, 0),
        StepTimes(1, 0.1, 0.9, 0, 0),
        StepTimes(2, 0.8, 0.2, 0, 0),
        StepTimes(3, 0.8, 0.2, 0, 0),
    ]
    worst = slowest(found, Layout(dp=2, pp=2))
    assert worst is not None and worst.ratio == 1
    assert slowest(found[:2], Layout(pp=2)) is None, "each does what no other does"


def test_a_rank_that_stays_slow_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Stragglers(Layout(dp=3), tmp_path, tmp_path)
    for window in range(1, 8):
        watched.look([reading(rank, 10 * window, own=0.9 if rank == 1 else 0.3, data=0, total=1) for rank in range(3)])
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: rank 1 is slow: 0.90 s of its own in each step, the others of its stage 0.30 s; "
        "the difference is in compute"
    ]
    kept = [json.loads(line) for line in (tmp_path / "ranks-00000.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [20, 30, 40, 50, 60, 70]
    assert kept[0]["ranks"][1] == pytest.approx({"rank": 1, "compute": 0.9, "wait": 0.1, "data": 0.0, "save": 0.1})
    assert read_slowest(tmp_path) == {"rank": 1, "because": "compute", "seconds": 0.9, "peers": 0.3}


def test_a_rank_that_is_slow_now_and_then_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Stragglers(Layout(dp=3), tmp_path, tmp_path)
    step, spent = 0, [0.0, 0.0, 0.0]
    for window in range(12):
        step += 10
        for rank in range(3):
            spent[rank] += 10 * (0.9 if rank == window % 3 else 0.3)
        watched.look([Reading(rank, 1, "step", step, spent={"step": spent[rank]}) for rank in range(3)])
    assert capsys.readouterr().err == ""
