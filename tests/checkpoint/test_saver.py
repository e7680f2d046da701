"""Saving in the background: what is written is the state at the save, and trouble costs a warning, not the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path, checkpoints, step_of
from cuboid.checkpoint.storage import whole_tensors
from cuboid.checkpoint.verify import verify
from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run
from tests.training.cases import short_run


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kept_steps(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder / "checkpoints")]


def test_steps_taken_while_it_is_written_do_not_reach_the_file(pool: Pool, tmp_path: Path) -> None:
    run = small_run("dp=2,zero=1", f"output.folder={tmp_path / 'many'}")
    published, reports = pool.run("tests.checkpoint.saver_jobs:save_while_training", (run,), ranks=2)[0]
    assert published == [], "the steps did not wait for the disk"
    assert [(report.step, report.warning) for report in reports] == [(1, "")]
    alone = small_run("dp=2,zero=1", "learning_rate.peak=1e-3", "learning_rate.schedule=constant")
    pool.run("tests.checkpoint.jobs:train_part", (alone, str(tmp_path / "one"), 0, 1, None), ranks=2)
    seen = whole_tensors(checkpoint_path(tmp_path / "many" / "checkpoints", 1))
    for name, tensor in whole_tensors(checkpoint_path(tmp_path / "one", 1)).items():
        assert torch.equal(seen[name], tensor), name


def test_every_save_is_reported_once(pool: Pool, tmp_path: Path) -> None:
    run = short_run("dp=2", str(tmp_path), "training.steps=5", "checkpoint.every=2", "checkpoint.keep_every=4")
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    saves = [save for row in rows(tmp_path) for save in row.get("checkpoints", [])]
    assert [save["step"] for save in saves] == [2, 4, 5]
    assert all(save["bytes"] > 12 * run.model.parameters and save["stall_seconds"] > 0 for save in saves)
    assert all(save["write_seconds"] > 0 and not save["warning"] for save in saves)
    longer = short_run("dp=2", str(tmp_path), "training.steps=9", "checkpoint.every=2", "checkpoint.keep_every=4")
    pool.run("tests.training.cases:train_rank", (longer,), ranks=2)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 10))
    assert kept_steps(tmp_path) == [4, 8, 9], "the fourth stays for ever"


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_costs_a_warning(pool: Pool, tmp_path: Path, asynchronous: str) -> None:
    more = ("training.steps=6", "checkpoint.every=2", "checkpoint.keep=1", f"checkpoint.asynchronous={asynchronous}")
    run = short_run("dp=2", str(tmp_path), *more)
    said = pool.run("tests.checkpoint.saver_jobs:train_on_bad_disk", (run, False), ranks=2)[0]
    assert said.count("warning: no checkpoint after step 4: ") == 1, said
    assert "No space left on device; the training continues" in said
    assert kept_steps(tmp_path) == [6]
    assert verify(checkpoint_path(tmp_path / "checkpoints", 6)).step == 6
    saves = [save for row in rows(tmp_path) for save in row.get("checkpoints", [])]
    assert [(save["step"], bool(save["warning"])) for save in saves] == [(2, False), (4, True), (6, False)]


def test_what_does_not_read_back_is_not_published(pool: Pool, tmp_path: Path) -> None:
    run = short_run("dp=2,zero=1", str(tmp_path), "training.steps=4", "checkpoint.every=2", "checkpoint.keep=1")
    said = pool.run("tests.checkpoint.saver_jobs:train_on_bad_disk", (run, True), ranks=2)[0]
    assert "data-00001.bin does not read back as it was written; the training continues" in said
    assert kept_steps(tmp_path) == [2], "the last verified one stays"


def test_a_rank_that_does_not_answer_costs_a_save(pool: Pool, tmp_path: Path) -> None:
    """The others give up at the deadline, the training continues, and later saves work again."""
    run = small_run("dp=2", f"output.folder={tmp_path}", "checkpoint.timeout_seconds=10.0")
    results = pool.run("tests.checkpoint.saver_jobs:outlast_a_stuck_rank", (run,), ranks=2)
    within = "within checkpoint.timeout_seconds=10"
    assert [published for published, _ in results] == [[3], [3]]
    assert results[0][1] == [
        f"no checkpoint after step 1: a rank did not answer {within}",
        f"no checkpoint after step 2: that after step 1 is not written {within}",
        "",
    ]
    assert verify(checkpoint_path(tmp_path / "checkpoints", 3)).step == 3


def test_who_no_longer_leads_removes_nothing_of_who_does(pool: Pool, tmp_path: Path) -> None:
    """One was frozen just before its save, and another has begun to write that step since."""
    run = small_run("dp=2", f"output.folder={tmp_path}", "checkpoint.timeout_seconds=60")
    told = pool.run("tests.checkpoint.saver_jobs:save_after_another_leads", (run,), ranks=2)
    assert told == ["another node leads this run now; this one writes nothing more"] * 2
    assert [path.read_text() for path in (tmp_path / "checkpoints").glob(".step-00000001.writing/*")] == ["new"]
