"""What the ranks do in tests of saving in the background: trainings on disks that are slow, full or stuck."""

from __future__ import annotations

import errno
import io
import os
import threading
from contextlib import redirect_stderr
from pathlib import Path
from unittest.mock import patch

import torch

from cuboid.checkpoint import location
from cuboid.checkpoint.folder import checkpoint_path, checkpoints, step_of
from cuboid.checkpoint.location import LocalFiles, Location
from cuboid.checkpoint.save import GivenUp, Saver, SaveReport, save
from cuboid.checkpoint.terms import FENCE, Term, Terms
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.run_folder import checkpoint_folder
from cuboid.training.step import train_step
from cuboid.training.trainer import train

CPU = torch.device("cpu")


class FullDisk(LocalFiles):
    """Half of what is written of the fourth step fits."""

    def write(self, handle: int, content: memoryview) -> None:
        if "step-00000004" in os.readlink(f"/proc/self/fd/{handle}"):
            super().write(handle, content[: content.nbytes // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(handle, content)


class LyingDisk(LocalFiles):
    """Of step 4 it keeps something else than it was given, and says nothing."""

    def write(self, handle: int, content: memoryview) -> None:
        if "step-00000004.writing/data" in os.readlink(f"/proc/self/fd/{handle}"):
            content = memoryview(bytes(content[:100]) + b"!" + bytes(content[101:]))
        super().write(handle, content)


class HeldDisk(LocalFiles):
    """Nothing of the first step is written before it is let go."""

    let_go = threading.Event()

    def write(self, handle: int, content: memoryview) -> None:
        if "step-00000001.writing/data" in os.readlink(f"/proc/self/fd/{handle}"):
            self.let_go.wait()
        super().write(handle, content)


def train_on_bad_disk(rank: int, run: Run, lying: bool) -> str:
    """The last rank's disk is full, or keeps something else; what was said on standard error."""
    bad = LyingDisk if lying else FullDisk
    files = bad if rank + 1 == run.layout.world_size else LocalFiles
    said = io.StringIO()
    with redirect_stderr(said), patch.object(location, "LocalFiles", files):
        train(run, rank, CPU, quiet=True)
    return said.getvalue()


class Steps:
    """Training by hand: a step, then a save."""

    def __init__(self, rank: int, run: Run, files: LocalFiles) -> None:
        self.run = run
        self.engine = build_engine(run, rank, CPU)
        self.optimizer = Optimizer(self.engine, run.optimizer)
        self.place = Location(files, checkpoint_folder(run).path)
        self.saver = Saver(self.engine, self.optimizer, self.place, open_coordination(run.checkpoint.timeout_seconds))
        self.done = 0

    def step(self) -> float:
        batches = micro_batches(make_source(self.run), self.run, self.done, self.engine.groups.coordinates.dp, CPU)
        self.done += 1
        return train_step(self.engine, self.optimizer, batches, 1e-3, self.saver.before_update).loss

    def published(self) -> list[int]:
        return [step_of(path) for path in checkpoints(self.place)]


def save_while_training(rank: int, run: Run) -> tuple[list[int], list[SaveReport]]:
    """Two more steps are taken while the state after the first waits to be written."""
    HeldDisk.let_go.clear()
    steps = Steps(rank, run, HeldDisk())
    steps.step()
    steps.saver.save(1)
    steps.step()
    steps.step()
    published = steps.published()
    HeldDisk.let_go.set()
    return published, steps.saver.finish()


def outlast_a_stuck_rank(rank: int, run: Run) -> tuple[list[int], list[str]]:
    """The last rank does not write the first checkpoint before the second is due, deadline and all."""
    HeldDisk.let_go.clear()
    steps = Steps(rank, run, HeldDisk() if rank + 1 == run.layout.world_size else LocalFiles())
    for step in (1, 2):
        steps.step()
        steps.saver.save(step)
    HeldDisk.let_go.set()
    threads = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    for thread in threads:
        thread.join()
    steps.step()
    steps.saver.save(3)
    warnings = [report.warning for report in steps.saver.finish()]
    return steps.published(), warnings


def save_after_another_leads(rank: int, run: Run) -> str:
    """What this rank is told."""
    folder, target = Path(run.output.folder), checkpoint_path(checkpoint_folder(run), 1)
    if rank == 0:
        Terms(folder).take(Term(2, "another"))
        aside = Path(target.parent.path) / f".{target.name}.writing"
        aside.mkdir(parents=True)
        (aside / "data-00000.bin").write_text("new")
    steps = Steps(rank, run, LocalFiles())
    FENCE.set(run.output.folder, 1)
    try:
        save(steps.engine, steps.optimizer, checkpoint_folder(run), 1)
    except GivenUp as given:
        return str(given)
    finally:
        FENCE.set("", 0)
    return "saved"
