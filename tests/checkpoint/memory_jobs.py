"""What the ranks do in tests of states in memory: nodes are names, each with a folder of its own."""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from cuboid.checkpoint.memory.node_state import Slot
from cuboid.checkpoint.memory.nodes import open_memory
from cuboid.checkpoint.memory.restore import MemoryRestore
from cuboid.checkpoint.memory.saver import MemorySaver
from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import Saver, SaveReport
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.run_folder import checkpoint_folder
from cuboid.training.step import train_step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Attempt:
    """What one life of a training did."""

    began: int
    losses: list[float]
    drawn: list[float]
    """From the rank's random generator, after the last step."""
    reports: list[SaveReport]
    said: str


EVENTS = 10
"""Moments of a save: before and after each of collective, collecting, publishing, agreement, withdrawing."""


def die_in_a_save(rank: int, run: Run, nodes: str, victim: int, step: int, event: int) -> Attempt:
    """One rank is killed while the state after this step is kept."""
    if rank != victim:
        return attempt(rank, run, nodes, step + 1)
    seen = 0

    def count(saver: MemorySaver) -> None:
        nonlocal seen
        if saver._step == step:
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(saver: MemorySaver, *arguments: Any) -> Any:
            count(saver)
            result = function(saver, *arguments)
            count(saver)
            return result

        return wrapper

    with ExitStack() as patches:
        for name in ("_start_copying", "_collect", "_publish", "_agree", "_withdraw_all_but"):
            patches.enter_context(patch.object(MemorySaver, name, watched(getattr(MemorySaver, name))))
        return attempt(rank, run, nodes, step + 1)


def stumble(rank: int, run: Run, nodes: str, until: int) -> Attempt:
    """Node b cannot publish its first state and its third."""
    real = Slot.publish

    def publish(slot: Slot, step: int, index: bytes, manifest: bytes) -> None:
        if nodes[rank] == "b" and step in (1, 3):
            raise OSError(errno.EIO, "no luck")
        real(slot, step, index, manifest)

    with patch.object(Slot, "publish", publish):
        return attempt(rank, run, nodes, until)


def attempt(rank: int, run: Run, nodes: str, until: int, newest: int = 10**6, back_at: int = 0) -> Attempt:
    """Train by hand from what there is until so many steps are done, each kept in memory and, where that is due, on
    disk; then this life is over, as if killed. `nodes`: one letter per rank. `newest`: the last row. `back_at`: after
    this step what is in memory is taken back."""
    said, losses = io.StringIO(), []
    with redirect_stdout(said), redirect_stderr(said):
        engine = build_engine(run, rank, CPU)
        optimizer = Optimizer(engine, run.optimizer)
        group = open_coordination(60)
        memory = open_memory(run, rank, group, nodes[rank])
        torch.manual_seed(rank)
        began = resume(engine, optimizer, checkpoint_folder(run), group, False, MemoryRestore(memory, group, newest))
        disk = Saver(engine, optimizer, checkpoint_folder(run), group)
        copies = MemorySaver(engine, optimizer, memory)
        for step in range(began, until):
            batches = micro_batches(make_source(run), run, step, engine.groups.coordinates.dp, CPU)
            losses.append(train_step(engine, optimizer, batches, 1e-3, copies.before_update).loss)
            torch.rand(1)
            copies.save(step + 1)
            if run.checkpoint.is_due(step + 1, run.training.steps):
                disk.save(step + 1)
            if step + 1 == back_at:
                copies.finish()
                copies.take_back()
        reports = [*disk.finish(), *copies.finish()]
    return Attempt(began, losses, torch.rand(3).tolist(), reports, said.getvalue())
