"""What a run tells trackers beside its own rows. Those that are installed are really written and read back."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.spec.run import TRACKERS
from cuboid.train.metrics import Metrics
from cuboid.train.step import StepResult
from cuboid.train.trackers import Tracking, check_trackers
from tests.train.cases import short_run


def record(folder: Path, track: str, steps: range, done: int = 0) -> None:
    run = short_run("dp=2", str(folder), "training.steps=5", f"output.track={track}")
    with Metrics(run, 0, quiet=True, done=done) as metrics:
        for step in steps:
            metrics.record(step, StepResult(5.0 - step, 1.0, 8), 1e-3, 0.5, [])


def test_json_lines_hold_numbers_and_go_on(tmp_path: Path) -> None:
    record(tmp_path, "jsonl", range(3))
    record(tmp_path, "jsonl", range(2, 4), done=2)
    rows = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert all(isinstance(value, int | float) for row in rows for value in row.values())


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    run = short_run("dp=2", str(tmp_path), "output.track=jsonl")
    with Metrics(run, 0, quiet=True) as metrics:
        metrics.record(0, StepResult(float("nan"), 1.0, 8), 1e-3, 0.5, [])
    (row,) = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert "loss" not in row and row["gradient_norm"] == 1.0


def test_a_tracker_that_fails_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tracked.jsonl").mkdir()
    record(tmp_path, "jsonl", range(2))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    error = capsys.readouterr().err
    assert error.count("warning: output.track=jsonl failed") == 1 and "the training goes on without it" in error


def test_what_is_not_there_is_refused_before_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, package in TRACKERS.items():
        run = short_run("dp=2", str(tmp_path), f"output.track={name}")
        if package and find_spec(package) is None:
            with pytest.raises(UserError, match=f"track={name} needs the package {package}; pip install {package}"):
                check_trackers(run)
        else:
            check_trackers(run)
    assert main(["train", "--set", "output.track=tensorbord", "--set", f"output.folder={tmp_path / 'run'}"]) == 2
    assert "output.track=tensorbord is unknown; use tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_none_is_the_rule(tmp_path: Path) -> None:
    tracking = Tracking(short_run("dp=2", str(tmp_path)), 0)
    tracking.log(1, {"loss": 1.0})
    tracking.close()
    assert not list(tmp_path.iterdir())
