"""What a training keeps of its state and continues from: in one process, with every way it can begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.save import SaveReport
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.training.checkpointer import Checkpointer
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step
from tests.parallel.cases import CPU, small_run


class Job:
    """One rank, from its checkpointer on."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        fields = (f"output.folder={folder}", "checkpoint.every=1", "training.steps=9", "model.layers=1")
        self.run = small_run("dp=1", *fields, *overrides)
        self.engine = build_engine(self.run, 0, CPU, draw=False)
        self.optimizer = Optimizer(self.engine, self.run.optimizer)
        self.checkpointer = Checkpointer(self.engine, self.optimizer, 0, quiet=True)
        self.source = make_source(self.run)

    def step(self, number: int) -> None:
        batches = micro_batches(self.source, self.run, self.engine.course.batch(number), 0, CPU)
        train_step(self.engine, self.optimizer, batches, 1e-2, self.checkpointer.before_update)

    def weights(self) -> torch.Tensor:
        return torch.cat([shard.master for shard in self.optimizer.optimizer_shards]).clone()


def test_a_first_start_draws_weights_and_a_second_reads_what_was_saved(tmp_path: Path) -> None:
    first = Job(tmp_path)
    assert (first.checkpointer.found, first.checkpointer.can_go_back) == (0, False)
    assert first.weights().std() > 0
    first.step(0)
    first.checkpointer.save(1)
    kept = first.weights()
    first.step(1)
    reports, whole = first.checkpointer.settle()
    assert whole and [report.step for report in reports] == [1]
    assert (first.checkpointer.saved, first.checkpointer.last_save, first.checkpointer.can_go_back) == (1, 1, True)
    second = Job(tmp_path)
    assert second.checkpointer.found == 1 and torch.equal(second.weights(), kept)
    assert second.optimizer.steps_taken == 1


def test_going_back_undoes_steps_and_repeats_them_bit_for_bit(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step(0)
    job.checkpointer.save(1)
    job.step(1)
    after = job.weights()
    job.checkpointer.settle()
    assert job.checkpointer.go_back() == 1
    assert not torch.equal(job.weights(), after)
    job.step(1)
    assert torch.equal(job.weights(), after)


def test_where_the_only_checkpoint_is_gone_a_run_goes_back_to_its_first_weights(tmp_path: Path) -> None:
    job = Job(tmp_path)
    drawn = job.weights()
    job.step(0)
    job.checkpointer.save(1)
    job.checkpointer.settle()
    checkpoint_path(tmp_path / "checkpoints", 1).remove()
    assert job.checkpointer.go_back() == 0
    assert torch.equal(job.weights(), drawn) and job.optimizer.steps_taken == 0
    moments = [moment for shard in job.optimizer.optimizer_shards for moment in job.optimizer.state_of(shard).values()]
    assert not any(moment.any() for moment in moments)


def test_all_steps_done_is_nothing_to_load(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step(0)
    job.checkpointer.save(1)
    job.checkpointer.settle()
    done = Job(tmp_path, "training.steps=1")
    assert done.checkpointer.found == 1 and not done.weights().any(), "nobody will look at them"


def test_without_checkpoints_there_is_nothing_to_save_or_to_wait_for(tmp_path: Path) -> None:
    job = Job(tmp_path, "checkpoint.every=0")
    assert job.checkpointer.saver is None and job.checkpointer.copies is None
    job.step(0)
    assert job.checkpointer.reports(1.0) == [] and job.checkpointer.settle() == ([], True)
    assert not (tmp_path / "checkpoints").exists()


def test_a_grace_period_that_is_too_short_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "resilience.grace_seconds=10")
    checkpointer = job.checkpointer

    def note(step: int, stall: float, write: float, size: int = 100) -> str:
        checkpointer._note([SaveReport(step, stall, write, size)])
        return capsys.readouterr().err

    checkpointer.reports(4.0)
    assert note(1, 1.0, 5.0) == "", "a step, the copy and the write take exactly that long"
    assert note(2, 1.0, 50.0, size=0) == "" and checkpointer.saved == 1, "it failed, and says so itself"
    assert note(3, 1.0, 5.5) == (
        "warning: resilience.grace_seconds=10 is less than a step and a save take here, 10.5 s: a preempted job would "
        "lose what it did since its last checkpoint\n"
    )
    assert note(4, 9.0, 9.0) == ""
