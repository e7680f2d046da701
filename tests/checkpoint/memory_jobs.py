"""What the ranks do in tests of states in memory: nodes are names, each with a folder of its own."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import torch

from cuboid.checkpoint.background import SaveReport
from cuboid.checkpoint.memory import open_memory
from cuboid.checkpoint.memory_recall import Recall
from cuboid.checkpoint.memory_saver import MemorySaver
from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import deadline_group
from cuboid.checkpoint.saver import Saver
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.apply import build_engine
from cuboid.spec.run import Run
from cuboid.train.folder import checkpoint_folder
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import train_step

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


def attempt(rank: int, run: Run, nodes: str, until: int, newest: int = 10**6) -> Attempt:
    """Train by hand from what there is until so many steps are done, each kept in memory and, where that is due, on
    disk; then this life is over, as if killed. `nodes`: one letter per rank. `newest`: the last row."""
    said, losses = io.StringIO(), []
    with redirect_stdout(said), redirect_stderr(said):
        engine = build_engine(run, rank, CPU)
        optimizer = Optimizer(engine, run.optimizer)
        group = deadline_group(60)
        memory = open_memory(run, rank, group, nodes[rank])
        torch.manual_seed(rank)
        began = resume(engine, optimizer, checkpoint_folder(run), group, False, Recall(memory, group, newest))
        disk = Saver(engine, optimizer, checkpoint_folder(run), group)
        copies = MemorySaver(engine, optimizer, memory)
        for step in range(began, until):
            batches = micro_batches(make_source(run), run, step, engine.groups.coordinates.dp, CPU)
            losses.append(train_step(engine, optimizer, batches, 1e-3, copies.before_update).loss)
            torch.rand(1)
            copies.save(step + 1)
            if run.checkpoint.is_due(step + 1, run.training.steps):
                disk.save(step + 1)
        reports = [*disk.finish(), *copies.finish()]
    return Attempt(began, losses, torch.rand(3).tolist(), reports, said.getvalue())
