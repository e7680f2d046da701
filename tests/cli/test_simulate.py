"""`cuboid simulate` and `cuboid train` on a plan file."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cuboid.cli.main import main
from cuboid.spec.run import load_run
from tests.cli.command import rows


def planned(folder: Path, *arguments: str) -> str:
    file = folder / "plan.toml"
    assert main(["plan", *arguments, "-o", str(file)]) == 0
    return str(file)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb1p", "zbv", "dualpipev"])
def test_every_schedule_is_drawn(schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix = f"pp=4,dp=2,tp=1,schedule={schedule}"
    file = planned(tmp_path, "llama3-8b", "h100x8", "--global-batch", "16", "--seq", "2048", "--fix", fix)
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    capsys.readouterr()
    assert main(["simulate", file, "--trace", str(trace), "--picture", str(picture), "--width", "60"]) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("rank ")]
    assert len(rows) == 4
    assert all(len(row) <= 60 + len("rank 0 ") for row in rows)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    kinds = {event["cat"] for event in events}
    assert "forward" in kinds
    assert ("weight gradient" in kinds) == (schedule in ("zb1p", "zbv", "dualpipev"))
    assert ElementTree.parse(picture).getroot() is not None


def test_fewer_micro_batches_are_drawn_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix = "pp=2,schedule=1f1b,micro_batch=1,dp=2"
    file = planned(tmp_path, "llama3-8b", "h100x4", "--global-batch", "32", "--seq", "1024", "--fix", fix)
    capsys.readouterr()
    assert main(["simulate", file, "--micro-batches", "3"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 16 micro-batches" in shown
    assert shown.count("bubble") == 1
    assert main(["simulate", file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["micro_batches"] == 16
    assert answer["peak_in_flight_by_rank"] == [2, 1]
    assert 0 < answer["bubble"] < 1


def test_the_simulated_pipeline_is_within_the_predicted_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = planned(tmp_path, "llama3-70b", "h100x64", "--global-batch", "64", "--seq", "4096", "--fix", "pp=4")
    capsys.readouterr()
    assert main(["simulate", file, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert main(["explain", file, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert simulated["makespan_seconds"] <= predicted["step_seconds"]
    assert simulated["bubble"] == pytest.approx(predicted["bubble"], abs=0.01)


def test_a_plan_trains(tmp_path: Path) -> None:
    """What was planned is what runs: two processes train the plan's layout from its own file."""
    fix = "dp=1,pp=2,schedule=1f1b,micro_batch=2"
    sizes = ["--global-batch", "4", "--seq", "32", "--precision", "float32"]
    file = planned(tmp_path, "tiny-llama", "cpux2", *sizes, "--fix", fix)
    chosen = ["data.source=python-stdlib", "training.steps=2", f"output.folder={tmp_path / 'run'}"]
    assert main(["train", file, *(word for each in chosen for word in ("--set", each))]) == 0
    assert [row["step"] for row in rows(tmp_path / "run/metrics.jsonl")] == [1, 2]
    trained = load_run(tmp_path / "run/run.toml").layout
    assert trained == load_run(file).layout and (trained.world_size, trained.pp) == (2, 2)
