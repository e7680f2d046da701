"""Trainings that keep their state in memory alone lose ranks, a node, all processes, and resume as if they had not."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from cuboid.checkpoint.memory.folder import NODE, node_folder
from cuboid.launch.pool import Pool
from cuboid.resilience.goodput import failures
from cuboid.spec.run import build_run
from tests.cli.command import SHORT, Training, rows, run, train
from tests.launch.ports import free_port

FIELDS = ("training.precision=float64", "learning_rate.schedule=constant", "checkpoint.memory_every=1")
FIELDS += ("checkpoint.asynchronous=false", "model.layers=2")
"""The state after each row is in memory before the next row is written."""


def wait_for(training: Training, what: str, step: int) -> None:
    """Until the run's folder holds this, and so many rows."""
    training.wait_until((training.folder / "runs/default" / what).exists)
    training.wait_for_a_step(step)


@pytest.mark.thorough
def test_killed_ranks_and_a_killed_run_go_on_from_memory(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "runs/default"
    training = Training(tmp_path, "dp=2,pp=2", *FIELDS)
    training.wait_for_a_step(5)
    before = len(rows(folder / "metrics.jsonl"))
    os.kill(training.ranks()[2], signal.SIGKILL)
    wait_for(training, "failures.jsonl", before + 3)
    os.killpg(training.command.pid, signal.SIGKILL)
    training.command.communicate()
    training.assert_nothing_is_left()
    said = training.log.read_text()
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
    pool.run("tests.training.cases:train_rank", (unharmed,), ranks=4)
    killed, whole = ([row["loss"] for row in rows(at / "metrics.jsonl")] for at in (folder, tmp_path / "unharmed"))
    assert killed == whole and len(whole) == done + 3
    assert not (folder / "checkpoints").exists()
    absolute = build_run(table, [*fields, f"output.folder={folder}"])
    assert not node_folder(absolute).exists(), "a run that has come to its end leaves nothing in memory"


def test_a_lost_node_is_made_good_by_the_copies_on_another(tmp_path: Path, pool: Pool) -> None:
    """Two supervisors; one is killed and its memory is gone. The other continues alone, on a layout planned for it."""
    memory, folder = tmp_path / "memory", tmp_path / "runs/default"
    memory.mkdir()
    fields = (*FIELDS, f"checkpoint.memory_folder={memory}", "resilience.contact_seconds=8")
    options = ("--nodes", "2", "--min-nodes", "1", "--rendezvous", f"127.0.0.1:{free_port()}")
    leader = Training(tmp_path, "dp=4,zero=1", *fields, options=options, variables={NODE: "a"})
    try:
        leader.wait_until(lambda: "coordinator at" in leader.log.read_text())
        other = Training(tmp_path, "dp=4,zero=1", *fields, options=options, variables={NODE: "b"})
        leader.wait_for_a_step(4)
        other.command.kill()  # its ranks end with it
        other.command.communicate()
        other.assert_nothing_is_left()
        before = len(rows(folder / "metrics.jsonl"))
        table = {"model": "tiny-llama", "output": {"folder": str(folder)}, "checkpoint": {"memory_folder": str(memory)}}
        shutil.rmtree(node_folder(build_run(table), "b"))
        wait_for(leader, "failures.jsonl", before + 3)
    finally:
        os.killpg(leader.command.pid, signal.SIGKILL)
        leader.command.communicate()
    leader.assert_nothing_is_left()
    said = leader.log.read_text()
    assert "each part with a copy on another node" in said and "no copies elsewhere, because all ranks share it" in said
    noted = failures(folder)[-1]  # of the node, or of a rank that missed its ranks first
    assert noted.restarted and noted.checkpoint >= before - 1
    assert f"resuming after step {noted.checkpoint} in memory, written on dp=4" in said
    survived = [row["loss"] for row in rows(folder / "metrics.jsonl")]
    alone = [*SHORT, *FIELDS, f"training.steps={len(survived)}", f"output.folder={tmp_path / 'alone'}"]
    unharmed = build_run({"model": "tiny-llama"}, [*alone, "checkpoint.memory_every=0"])
    pool.run("tests.training.cases:train_rank", (unharmed,), ranks=1)
    assert survived == pytest.approx([row["loss"] for row in rows(tmp_path / "alone/metrics.jsonl")], rel=1e-9)
