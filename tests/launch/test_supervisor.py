"""A rank dies while a training is in flight: it continues by itself, as if nothing had happened."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from cuboid.errors import RankError
from cuboid.launch.pool import Pool
from cuboid.launch.supervisor import supervise
from cuboid.resilience.goodput import failures
from cuboid.spec.run import build_run
from tests.cli.command import SHORT, Training, rows, run, train
from tests.data.corpora import make_store

FIELDS = ("checkpoint.every=2", "training.precision=float64", "learning_rate.schedule=constant", "model.layers=4")


def test_a_killed_rank_costs_a_restart_and_changes_no_number(tmp_path: Path, pool: Pool) -> None:
    """How many steps there are by the time it is killed, and ended, is left to the machine."""
    training, folder = Training(tmp_path, "dp=2,pp=2", *FIELDS), tmp_path / "runs/default"
    training.wait_for_a_step(5)
    assert training.listening() == {"0100007F"}, "ranks that share a machine listen on loopback only"
    os.kill(training.ranks()[2], signal.SIGKILL)
    training.wait_until(lambda: "resuming after step" in training.log.read_text())
    training.wait_for_a_step((folder / "metrics.jsonl").read_text().count("\n") + 3)
    training.command.send_signal(signal.SIGTERM)
    code, errors = training.end()
    warnings = [line for line in errors.splitlines() if line.endswith("starting again")]
    assert code == 75, errors
    assert warnings == ["warning: rank 2 failed: it was ended by SIGKILL (out of memory?); starting again"]
    training.assert_nothing_is_left()
    killed = [row["loss"] for row in rows(folder / "metrics.jsonl")]
    fields = [*SHORT, *FIELDS, f"training.steps={len(killed)}", f"output.folder={tmp_path / 'unharmed'}"]
    unharmed = build_run({"model": "tiny-llama", "layout": "dp=2,pp=2"}, fields)
    pool.run("tests.training.cases:train_rank", (unharmed,), ranks=4)
    assert killed == [row["loss"] for row in rows(tmp_path / "unharmed/metrics.jsonl")]
    (noted,) = failures(folder)
    assert noted.restarted and noted.checkpoint in range(2, len(killed), 2)


def test_attempts_leave_no_folders_of_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that fails nor the next."""
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    ended = run(train("--layout", "dp=2", "--inject", "kill rank=1 step=3", "--set", "checkpoint.every=1"), tmp_path)
    assert ended.returncode == 0 and "starting again" in ended.stderr, ended.stderr
    assert list((tmp_path / "t").iterdir()) == []


def test_a_killed_supervisor_takes_ranks_with_it_that_are_stopped(tmp_path: Path) -> None:
    """These notice nothing by themselves."""
    training = Training(tmp_path, "dp=2", "model.layers=1")
    training.wait_for_a_step()
    os.kill(training.ranks()[1], signal.SIGSTOP)
    training.command.kill()
    training.end()
    training.assert_nothing_is_left()


def test_data_that_is_cut_short_under_a_run_is_named(tmp_path: Path) -> None:
    """Whoever reads a mapped file beyond its end is ended by the system without a word."""
    store = make_store(tmp_path / "store", [f"document {number} " * 100 for number in range(50)])
    training = Training(tmp_path, "dp=1", f"data.source={store.folder}", "model.vocab=257")
    training.wait_for_a_step()
    os.truncate(store.folder / "tokens.bin", 0)
    code, errors = training.end()
    assert code == 2, errors
    assert f"error: {store.folder}/tokens.bin is damaged: it has 0 bytes, not" in errors


def test_attempts_that_get_nowhere_come_to_an_end(tmp_path: Path) -> None:
    table = {"model": "tiny-llama", "output": {"folder": str(tmp_path)}, "checkpoint": {"every": 2}}
    attempts = 0

    def attempt() -> float:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
        raise RankError("rank 0 failed: it always does")

    with pytest.raises(RankError, match=r"^rank 0 failed: it always does; 3 attempts in a row made no checkpoint$"):
        supervise(build_run(table, ["resilience.restarts=2"]), attempt)
    assert attempts == 5, "one, one that got on, and three that did not"
    assert [failure.restarted for failure in failures(tmp_path)] == [True, True, True, True, False]


def test_no_restarts_are_none_after_a_new_checkpoint_too(tmp_path: Path) -> None:
    table = {"model": "tiny-llama", "output": {"folder": str(tmp_path)}, "checkpoint": {"every": 2}}
    attempts = []

    def attempt() -> float:
        attempts.append(1)
        (tmp_path / "checkpoints/step-00000002").mkdir(parents=True, exist_ok=True)
        raise RankError("rank 1 failed")

    with pytest.raises(RankError, match=r"^rank 1 failed$"):
        supervise(build_run(table, ["resilience.restarts=0"]), attempt)
    assert len(attempts) == 1
    assert [failure.restarted for failure in failures(tmp_path)] == [False]


def test_without_checkpoints_there_is_nothing_to_start_again_from(tmp_path: Path) -> None:
    calls = []

    def attempt() -> float:
        calls.append(1)
        raise RankError("rank 1 failed")

    with pytest.raises(RankError, match=r"^rank 1 failed$"):
        supervise(build_run({"model": "tiny-llama", "output": {"folder": str(tmp_path)}}), attempt)
    assert len(calls) == 1


def test_on_a_full_disk_no_attempt_is_made_before_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"model": "tiny-llama", "output": {"folder": str(tmp_path)}, "checkpoint": {"every": 2}}
    refusals, attempts, took = [True, True, False, True, True, True], list[int](), os.posix_fallocate

    def take(*arguments: int) -> None:
        if refusals.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        took(*arguments)

    def attempt() -> float:
        attempts.append(len(refusals))
        raise RankError("rank 0 failed")

    monkeypatch.setattr(os, "posix_fallocate", take)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="75"):
        supervise(build_run(table), attempt, lambda: not refusals)
    assert attempts == [6, 3], "the second when the disk took what was asked, and none when the job was to stop"
    assert capsys.readouterr().err.count("is full; ranks start when there is room") == 2
    assert not list(tmp_path.glob(".room*"))
