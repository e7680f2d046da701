"""The measured timeline: its bubble, its clocks, and how far its simulation is off."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.report.compare import compare
from cuboid.report.measured import Reading, Sent, align
from cuboid.report.page import collect
from cuboid.report.source import open_source
from cuboid.report.timeline import PREDICTED, SIMULATED, merged_trace
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, simulate
from tests.report.cases import make_run, row, write_memory, write_rows, write_timing

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


@pytest.mark.parametrize("skew", [{}, {0: 0.0, 1: 3.0, 2: -7.5, 3: 11.0}])
def test_ranks_of_hosts_with_other_clocks_meet_in_one_trace(tmp_path: Path, skew: dict[int, float]) -> None:
    run = make_run(tmp_path, "dp=2,pp=2")
    write_timing(run, COSTS, skew)
    trace = merged_trace(open_source(tmp_path, "cpux4"))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    truth = simulate(make_schedule("1f1b", 2, 4), COSTS, 1e-3)
    expected = {str(event.action): event for event in truth.events}
    real = [event for event in events if event["pid"] < SIMULATED and event["cat"] not in ("wait", "collective")]
    together = [event for event in events if event["cat"] == "collective"]
    assert [(event["name"], event["dur"]) for event in together] == 4 * [("all-reduce data", 250_000)]
    assert len(real) == 2 * len(expected)
    for rank in range(4):
        # Pipelines that exchange no messages keep the time of day, here seconds apart; inside one nothing is off.
        own = [event for event in real if event["tid"] % 2 == rank % 2]
        begin = min(event["ts"] for event in own)
        for event in own:
            assert event["ts"] - begin == pytest.approx(expected[event["name"]].start * 1e6, abs=0.01)
            assert event["dur"] == pytest.approx((expected[event["name"]].end - expected[event["name"]].start) * 1e6)
    waits = [event for event in events if event["cat"] == "wait" and event["tid"] == 2]
    assert waits[0]["dur"] == pytest.approx(21_000), "the first message of stage 1"
    assert len([event for event in events if event["pid"] == SIMULATED]) == len(expected)
    assert len([event for event in events if event["pid"] == PREDICTED]) == len(expected)
    assert trace["otherData"]["steps"] == [2]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert len([name for name in names if name.startswith("measured on ")]) == (4 if skew else 1)


def test_the_trace_of_a_run_without_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 2
    assert "train with --set output.keep_timing=true" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses at common steps, what was measured, and settings that differ, defaults included."""
    first, second = tmp_path / "first", tmp_path / "second"
    run = make_run(first, "dp=2", 3)
    make_run(second, "pp=2", 2, "learning_rate.peak=1e-3")
    write_memory(run, 0, 2**30)
    write_rows(first / "metrics.jsonl", [row(step) for step in (1, 2, 3)])
    write_rows(second / "metrics.jsonl", [row(1, loss=5.9), row(2, loss=5.75)])
    found = compare([open_source(first), open_source(second)])
    assert found.names == ["first", "second"]
    assert found.losses == [{"step": 1, "values": [5.9, 5.9]}, {"step": 2, "values": [5.8, 5.75]}]
    assert found.largest_difference == pytest.approx(0.05)
    assert [told["memory_gib"] for told in found.measured] == [1.0, None]
    assert {entry["key"]: entry["values"] for entry in found.settings} == {
        "layout": ["dp=2,tp=1,pp=1", "dp=1,tp=1,pp=2"],
        "training.steps": [3, 2],
        "learning_rate.peak": [3e-4, 1e-3],
    }
    assert main(["compare", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "learning_rate.peak" in shown and "largest difference of losses at one step: 0.05" in shown
    assert main(["compare", str(first), str(second), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_difference"] == pytest.approx(0.05)
    assert main(["compare", str(first), str(first)]) == 0
    assert "the same settings" in capsys.readouterr().out
    assert main(["compare", str(first)]) == 2
    assert "name two or more" in capsys.readouterr().err
