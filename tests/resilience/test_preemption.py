"""SIGTERM and SIGUSR1 at any moment to any process of a job: what was done is saved, the exit code says so, and the
same command continues as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from cuboid.resilience.goodput import failures
from cuboid.spec.run import Run
from cuboid.training.trainer import Outcome
from tests.cli.command import SHORT, Training, environment, rows, train
from tests.training.cases import short_run

LAYOUT = "dp=2,pp=2"


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder / "metrics.jsonl")]


def _trained(folder: Path, *fields: str) -> Run:
    settings = (
        "training.precision=float64",
        "evaluation.every=2",
        "data.validation_fraction=0.1",
        "model.layers=2",
        *fields,
    )
    return short_run(LAYOUT, str(folder), "evaluation.batches=2", *settings)


def test_a_signal_in_every_phase_changes_no_number(tmp_path: Path, pool: Pool) -> None:
    """Each attempt is sent one signal later than the one before: in set-up, first step, steps, evaluations, saves."""
    undisturbed = _trained(tmp_path / "undisturbed", "training.steps=12")
    pool.run("tests.training.cases:train_rank", (undisturbed,), ranks=4)
    folder = tmp_path / "signalled"
    disturbed, done, call = _trained(folder, "training.steps=12", "checkpoint.every=3"), 0, 0
    while done < 12:
        call += 1
        results = pool.run("tests.resilience.signal_jobs:train_signalled", (disturbed, call % 4, call), ranks=4)
        outcomes: list[Outcome] = [outcome for outcome, _ in results]
        assert len({(outcome.preempted, outcome.saved) for outcome in outcomes}) == 1, "all ranks agree"
        assert results[call % 4][1] <= call, "no rank continues after it was asked"
        done = outcomes[0].saved
        kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert not done or kept[-1] == f"step-{done:08d}"
    assert call >= 5 and not outcomes[0].preempted
    assert losses(folder) == losses(tmp_path / "undisturbed") and len(losses(folder)) == 12


@pytest.mark.thorough
def test_signals_to_the_command_and_to_the_whole_group(tmp_path: Path, pool: Pool) -> None:
    fields = ("training.steps=40", "checkpoint.every=50", "training.precision=float64", "model.layers=4")
    saved = 0
    for whom, sent in (("command", signal.SIGUSR1), ("group", signal.SIGTERM)):
        training = Training(tmp_path, LAYOUT, *fields)
        training.wait_for_a_step(saved + 2)
        (os.killpg if whom == "group" else os.kill)(training.command.pid, sent)
        assert training.end() == (75, ""), whom
        training.assert_nothing_is_left()
        last = training.log.read_text().splitlines()[-1]
        before, saved = saved, max(int(path.name[5:]) for path in (tmp_path / "runs/default/checkpoints").iterdir())
        assert last.startswith(f"preempted: step {saved} is saved, in ") and saved > before
    assert not failures(tmp_path / "runs/default")
    plain = (*SHORT, *fields, "learning_rate.peak=3e-4", "learning_rate.warmup_steps=0")
    for folder in (tmp_path / "runs/default", tmp_path / "whole"):  # the one continues, the other begins
        pool.run("tests.training.cases:train_rank", (short_run(LAYOUT, str(folder), *plain),), ranks=4)
    assert losses(tmp_path / "runs/default") == losses(tmp_path / "whole")


@pytest.mark.thorough
def test_a_rank_under_torchrun_and_one_alone(tmp_path: Path) -> None:
    fields = [*SHORT, "training.steps=100000", "checkpoint.every=100000"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for arguments in ([*launcher, *train("--layout", "dp=2", fields=fields)], train(fields=fields)):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("step "):
                process.send_signal(signal.SIGTERM)
                break
        seen += process.stdout.readlines()
        assert seen[-1].startswith("preempted: step "), seen
        # torchrun tells the ranks and has an exit code of its own for being stopped.
        assert process.wait(timeout=300) == (1 if arguments[:2] == launcher[:2] else 75)
        (tmp_path / "runs").rename(tmp_path / f"runs-{len(arguments)}")


def test_a_job_that_cannot_save_ends_when_its_time_is_over(tmp_path: Path) -> None:
    """Which it has learned, and said, with its first save."""
    training = Training(tmp_path, LAYOUT, "checkpoint.every=2", "resilience.grace_seconds=0.001")
    training.wait_for_a_step(5)
    os.kill(training.ranks()[1], signal.SIGSTOP)
    training.command.send_signal(signal.SIGTERM)
    code, errors = training.end()
    assert code == 75, errors
    assert "warning: resilience.grace_seconds=0.001 are over and nothing new is saved" in errors.splitlines()
    assert errors.count("resilience.grace_seconds=0.001 is less than a step and a save take here, ") == 1
    training.assert_nothing_is_left()


def test_without_checkpoints_a_signal_stops_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path, LAYOUT)
    training.wait_for_a_step(1)
    training.command.terminate()
    assert training.end() == (143, "stopped by SIGTERM\n")
    training.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("grace", "again", "code", "said"),
    [
        ("100", True, 143, "warning: stopped by a second SIGTERM; nothing new is saved\n"),
        ("0.5", False, 75, "warning: resilience.grace_seconds=0.5 are over and nothing new is saved\n"),
    ],
)
def test_a_second_signal_or_the_end_of_the_grace_ends_a_process(grace: str, again: bool, code: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("deaf.py")), grace],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    for _ in range(2):  # at once: from the scheduler to all processes, and from a launcher to its ranks
        process.send_signal(signal.SIGTERM)
    limit = time.monotonic() + 300
    while again and process.poll() is None and time.monotonic() < limit:
        time.sleep(3)  # and again: it may have had no core to hear the first one on
        process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[1] == said
    assert process.returncode == code
