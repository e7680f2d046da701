"""What a run tells trackers beside its own rows. Those that are installed are really written and read back."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.spec.run import TRACKERS
from cuboid.training.metrics import Metrics
from cuboid.training.step import StepResult
from cuboid.training.trackers import Tracking, _identity, check_trackers
from tests.training.cases import short_run


def record(folder: Path, track: str, steps: range, done: int = 0) -> None:
    run = short_run("dp=2", str(folder), "training.steps=5", f"output.track={track}")
    with Metrics(run, 0, quiet=True, done=done) as metrics:
        for step in steps:
            metrics.record(step + 1, StepResult(5.0 - step, 1.0, 8, sequences=4, learning_rate=1e-3, seconds=0.5), [])


def test_json_lines_hold_numbers_and_go_on(tmp_path: Path) -> None:
    record(tmp_path, "jsonl", range(3))
    record(tmp_path, "jsonl", range(2, 4), done=2)
    rows = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert all(isinstance(value, int | float) for row in rows for value in row.values())


def test_tensorboard_holds_every_step_once(tmp_path: Path) -> None:
    """Read back by its own reader; what was done again after a failure takes the place of what was before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, "tensorboard", range(3))
    record(tmp_path, "tensorboard", range(2, 5), done=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "gradient_norm", "learning_rate", "tokens_per_second"} <= set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, 6.0 - step) for step in range(1, 6)
    ]
    assert not [name for name in events.Tags()["scalars"] if name in ("step", "time", "finite")]
    (text,) = {event.tensor_proto.string_val[0] for event in events.Tensors("run/text_summary")}
    assert b'layout = "dp=2' in text, "the run file, to know what was tracked"


def test_other_trackers_keep_what_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network and without an account; those that are installed, which `pip install cuboid[track]` does."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    kept = {"wandb-offline": "wandb/offline-run-*/*.wandb", "trackio": "../trackio/**/*.db"}
    for name in (name for name in kept if find_spec(TRACKERS[name])):
        record(tmp_path / name, name, range(3))
        assert "failed" not in capsys.readouterr().err
        limit = time.monotonic() + 120  # a process of its own may still write when its library has said good-bye
        while not any(b"gradient_norm" in file.read_bytes() for file in (tmp_path / name).glob(kept[name])):
            assert time.monotonic() < limit, list((tmp_path / name).rglob("*"))
            time.sleep(0.1)


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    run = short_run("dp=2", str(tmp_path), "output.track=jsonl")
    with Metrics(run, 0, quiet=True) as metrics:
        metrics.record(1, StepResult(float("nan"), 1.0, 8, seconds=0.5), [])
    (row,) = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert "loss" not in row and row["gradient_norm"] == 1.0


def test_a_tracker_that_fails_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tracked.jsonl").mkdir()
    record(tmp_path, "jsonl", range(2))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    error = capsys.readouterr().err
    assert error.count("warning: output.track=jsonl failed") == 1 and "the training continues without it" in error


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


def test_a_run_has_one_name_among_trackers_wherever_it_is_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert _identity(Path("runs/mine")) == _identity(tmp_path / "runs/mine") == _identity(Path("runs/../runs/mine"))
    assert _identity(Path("runs/mine")) != _identity(Path("runs/other"))
