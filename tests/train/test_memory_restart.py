"""A training that keeps its state in memory alone is killed, first a rank, then all of it, and goes on bit for bit."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from cuboid.checkpoint.memory_folder import node_folder
from cuboid.launch.pool import Pool
from cuboid.resilience.failures import failures
from cuboid.spec.run import build_run
from tests.cli.command import SHORT, Training, rows, run, train

FIELDS = ("training.precision=float64", "learning_rate.schedule=constant", "checkpoint.memory_every=1")
FIELDS += ("checkpoint.asynchronous=false", "model.layers=2")
"""The state after each row is in memory before the next row is written."""


def wait_for(training: Training, what: str, step: int) -> None:
    """Until the run's folder holds this, and so many rows."""
    limit = time.monotonic() + 240
    while not (training.folder / "runs/default" / what).exists():
        assert training.command.poll() is None, training.command.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    training.wait_for_a_step(step)


def test_killed_ranks_and_a_killed_run_go_on_from_memory(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "runs/default"
    training = Training(tmp_path, "dp=2,pp=2", *FIELDS)
    training.wait_for_a_step(5)
    before = len(rows(folder / "metrics.jsonl"))
    os.kill(training.ranks()[2], signal.SIGKILL)
    wait_for(training, "failures.jsonl", before + 3)
    os.killpg(training.command.pid, signal.SIGKILL)
    said, _ = training.command.communicate()
    training.assert_nothing_is_left()
    (noted,) = failures(folder)
    assert noted.restarted and noted.checkpoint >= before - 1
    assert f"resuming after step {noted.checkpoint} in memory, written on dp=2" in said
    done = (folder / "metrics.jsonl").read_text().count("\n")
    fields = [*SHORT, *FIELDS, f"training.steps={done + 3}"]
    again = run(train("--layout", "dp=2,pp=2", fields=fields), tmp_path)
    assert again.returncode == 0, again.stderr
    found = re.search(r"resuming after step (\d+) in memory", again.stdout)
    assert found is not None and int(found[1]) >= done - 1, again.stdout
    table = {"model": "tiny-llama", "layout": "dp=2,pp=2"}
    unharmed = build_run(table, [*fields, f"output.folder={tmp_path / 'unharmed'}", "checkpoint.memory_every=0"])
    pool.run("tests.train.cases:train_rank", (unharmed,), ranks=4)
    killed, whole = ([row["loss"] for row in rows(at / "metrics.jsonl")] for at in (folder, tmp_path / "unharmed"))
    assert killed == whole and len(whole) == done + 3
    assert not (folder / "checkpoints").exists()
    absolute = build_run(table, [*fields, f"output.folder={folder}"])
    assert not node_folder(absolute).exists(), "a run that has come to its end leaves nothing in memory"
