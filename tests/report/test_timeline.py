"""The measured timeline: its bubble, its clocks, and how far its simulation is off."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cuboid.report.measured import Reading, Sent, align
from cuboid.report.page import collect
from cuboid.report.source import open_source
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, simulate
from tests.report.cases import make_run, row, write_rows, write_timing

COSTS = StageCosts(forward=(0.02, 0.05), input_backward=(0.03, 0.04), weight_backward=(0.02, 0.01))


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("skew", [{}, {0: 0.0, 1: 3.0, 2: -7.5, 3: 11.0}])
def test_the_bubble_of_known_times(tmp_path: Path, schedule: str, skew: dict[int, float]) -> None:
    """Also where every rank is on a host whose clock is seconds off: messages take as long both ways."""
    run = make_run(tmp_path, f"dp=2,pp=2,schedule={schedule}")
    write_rows(tmp_path / "metrics.jsonl", [row(1), row(2)])
    write_timing(run, COSTS, skew)
    tracks = {track["id"]: track for track in collect(open_source(tmp_path), False)["timeline"]["tracks"]}
    truth = simulate(make_schedule(schedule, 2, 4), COSTS, 1e-3)
    for name in ("measured-typical", "replayed"):
        track = tracks[name]
        assert track["bubble"] == pytest.approx(truth.bubble_fraction, rel=1e-6)
        assert track["seconds"] == pytest.approx(truth.makespan, rel=1e-6)
        assert [lane["rank"] for lane in track["lanes"]] == ([0, 2] if name != "replayed" else [0, 1])
    assert tracks["measured-typical"]["hosts"] == (2 if skew else 1)
    assert tracks["measured-typical"]["uncertain"] == pytest.approx(1e-3 if skew else 0.0, abs=1e-9)
    first = tracks["measured-typical"]["lanes"][1]["events"][:6]
    assert first[:3] == [0, 1, 0] and first[4] == pytest.approx(0.021 / 1e-7), "forward of stage 1, after its message"


def test_clocks_without_messages_keep_the_time_of_day() -> None:
    readings = {0: Reading("a", 100.0), 1: Reading("b", 200.0), 2: Reading("b", 200.5)}
    alone = align(readings, [])
    assert alone.offset == {0: 100.0, 1: 200.25, 2: 200.25} and math.isinf(alone.uncertain)
    # One second there and three back by the clocks, so b is one second behind.
    both = align(readings, [Sent(0, 1, 5.0, 106.0 - 200.25), Sent(1, 0, 7.0, 110.25)])
    assert both.offset[1] - both.offset[0] == pytest.approx(100.25 + 1.0)
    assert both.uncertain == pytest.approx(2.0)
