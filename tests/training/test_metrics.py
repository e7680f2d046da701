"""What a training says: rows in metrics.jsonl, lines on the console, the progress bar of a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuboid.data.assignment import Assignment
from cuboid.parallel.pipeline import TimedAction
from cuboid.schedule.table import Action, Kind
from cuboid.training.metrics import Metrics
from cuboid.training.routers import DEAD_STEPS, WINDOWS
from cuboid.training.step import StepResult
from tests.training.cases import short_run

TIMING = [TimedAction(Action(Kind.FORWARD, 0, 1), 2.0, 2.25, 2.5)]


def record(folder: Path, *results: StepResult, rank: int = 0, quiet: bool = False, **output: object) -> None:
    settings = [f"output.{key}={str(value).lower()}" for key, value in output.items()]
    run = short_run("dp=2", str(folder), f"training.steps={len(results)}", *settings)
    with Metrics(run, rank, quiet) as metrics:
        for step, result in enumerate(results, 1):
            metrics.record(step, replace(result, sequences=8, learning_rate=1e-3, seconds=0.5), TIMING)


def rows(folder: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uneven = StepResult(4.0, 1.25, 128, assignment=Assignment([], 1.0625, 1.5))
    record(tmp_path, StepResult(5.25, 1.5, 100, activation=0.75), uneven)
    first, second = rows(tmp_path)
    assert (second["imbalance"], second["imbalance_in_order"]) == (1.0625, 1.5)
    assert first.pop("time") == pytest.approx(time.time(), abs=600)
    for name in ("goodput", "spent"):
        first.pop(name)
    assert first == {
        "step": 1,
        "loss": 5.25,
        "gradient_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 128,
        "labelled_tokens": 100,
        "seconds": 0.5,
        "tokens_per_second": 256.0,
        "finite": True,
        "activation_rms": 0.75,
    }
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2  loss 5.2500  norm 1.500  lr 1.00e-03  256 tokens/s",
        "step 2/2  loss 4.0000  norm 1.250  lr 1.00e-03  256 tokens/s  busiest replica 1.06× (in order 1.50×)",
    ]
    assert not list(tmp_path.glob("timing-*"))


def test_rows_are_there_while_training_goes_on(tmp_path: Path) -> None:
    run = short_run("dp=2", str(tmp_path))
    with Metrics(run, 0, quiet=True) as metrics:
        metrics.record(1, StepResult(5.0, 1.0, 1, seconds=0.5), [])
        assert len(rows(tmp_path)) == 1


def test_loads_of_experts_are_kept_in_few_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Summed over windows; an expert that got no token for long is dead, and comes back with its first."""

    def routed(*asked: int) -> StepResult:
        loads = torch.tensor([[*asked, 2.0, 0, 0], [4.0, 4, 4, 4, 2, 0, 0]]).double()
        return StepResult(5.0, 1.0, 1, routers=loads, sequences=8, seconds=0.5)

    mixture = ("model=tiny-mixtral", "model.layers=2", "model.mixture.experts=4", "model.mixture.top_k=1")
    run = short_run("dp=2", str(tmp_path), f"training.steps={WINDOWS * 3}", "output.track=jsonl", *mixture)
    with Metrics(run, 0) as metrics:
        for step in range(DEAD_STEPS + 1):
            metrics.record(step + 1, routed(16, 0, 0, 0) if step == 1 else routed(8, 7, 1, 0), [])
        metrics.record(DEAD_STEPS + 2, routed(8, 6, 1, 1), [])
        metrics.rewind(3)
        metrics.record(4, routed(8, 6, 1, 1), [])
    kept = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert kept == [{"step": 3, "first": 1, "loads": [[267, 117, 17, 0], [100] * 4]}], "in percent, rounded up"
    routers = [row["routers"] for row in rows(tmp_path)]
    assert routers[0] == {"balance_loss": 2 / 8, "z_loss": 0.0, "dropped": 0, "largest_load": [2.0, 1.0], "dead": 0}
    said = capsys.readouterr().out.splitlines()
    assert said[DEAD_STEPS - 1].endswith("busiest expert 2.00×  dead experts 1")
    assert "dead" not in said[DEAD_STEPS - 2] and "dead" not in said[DEAD_STEPS + 1]
    tracked = json.loads((tmp_path / "tracked.jsonl").read_text().splitlines()[1])
    assert (tracked["routers/largest_load"], tracked["routers/dead"]) == (4.0, 0)


def test_a_step_that_is_not_finite_is_always_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = StepResult(5.0, 1.0, 1), StepResult(math.nan, math.inf, 1)
    record(tmp_path, good, bad, good, good, log_every=100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert lines[0].endswith("not finite: update skipped on all ranks")
    found = rows(tmp_path)[1]
    assert (found["loss"], found["gradient_norm"], found["finite"]) == (None, None, False)


def test_log_every(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, *[StepResult(5.0, 1.0, 1)] * 7, log_every=3)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3/7", "6/7", "7/7"]
    assert len(rows(tmp_path)) == 7, "the file has every step"


def test_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, StepResult(5.0, 1.0, 1), quiet=True)
    assert capsys.readouterr().out == ""
    assert len(rows(tmp_path)) == 1


def test_other_ranks_say_nothing_and_keep_only_their_timing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, StepResult(5.0, 1.0, 1), rank=3, keep_timing=True)
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["timing-00003.jsonl"]
    kept = json.loads((tmp_path / "timing-00003.jsonl").read_text())
    assert kept.pop("clock") == pytest.approx(time.time() - time.perf_counter(), abs=60)
    assert kept.pop("seconds") > 0 and kept.pop("host")
    expected = {"step": 1, "actions": [["F0.1", 2.0, 2.25, 2.5]], "collectives": []}
    assert kept == expected, "an action's start, when its input was there, its end"


@pytest.mark.parametrize("columns", [120, 20])
def test_a_terminal_has_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        record(tmp_path, StepResult(5.0, 1.0, 1), StepResult(4.0, 1.0, 1))
    content = b""
    with io.FileIO(ours) as reader, suppress(OSError):  # which is how a terminal ends; a slow one shows many bars
        while part := reader.read(1 << 16):
            content += part
    shown = content.decode()
    assert "2/2" in shown
    assert "5.0000" in shown.replace("\r\n", ""), "the loss is never missing, however narrow the terminal"
    assert len(rows(tmp_path)) == 2
