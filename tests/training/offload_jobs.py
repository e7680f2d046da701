"""What the ranks of the pool do in tests of offloading: on CPUs it changes nothing, so copying is asked for by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.save import load, save
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.spec.run import Run
from cuboid.training.offload import OffloadedState
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations
from cuboid.training.step import train_step

CPU = torch.device("cpu")
LOAD = 1024
"""So little that matrices come in several loads."""


def make(run: Run, rank: int, compiled: bool, away: bool) -> tuple[Engine, Optimizer]:
    """`compiled`: the update alone, which is what may differ."""
    engine = replace(build_engine(run, rank, CPU), compiled=compiled)
    state = OffloadedState(engine.units, CPU, LOAD) if away else None
    return engine, Optimizer(engine, run.optimizer, state)


def contents(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    found = {}
    for optimizer_shard in optimizer.optimizer_shards:
        tensors = [optimizer_shard.master, *optimizer.state_of(optimizer_shard).values()]
        found[optimizer_shard.part.name] = [tensor.clone() for tensor in tensors]
    return found


def train(engine: Engine, optimizer: Optimizer, steps: range) -> list[float]:
    run = engine.run
    losses = []
    for step in steps:
        batches = micro_batches(make_source(run), run, step, engine.groups.coordinates.dp, CPU)
        losses.append(train_step(engine, optimizer, batches, 1e-2).loss)
    return losses


def differences(rank: int, run: Run, folder: str, compiled: bool) -> list[str]:
    """What three steps leave otherwise with the state away than with it here; through a checkpoint, too."""
    here, there = (make(run, rank, compiled, away) for away in (False, True))
    found = []
    if train(*here, range(3)) != train(*there, range(2)) + train(*there, range(2, 3)):
        found.append("losses")
    found += _unequal(here[1], there[1])
    found += map(str, deviations(*there))
    save(*there, Path(folder), 3)
    again = make(run, rank, compiled, away=True)
    load(*again, checkpoint_path(folder, 3))
    found += _unequal(here[1], again[1])
    if train(*here, range(3, 4)) != train(*again, range(3, 4)):
        found.append("losses after loading")
    return found + _unequal(here[1], again[1])


def _unequal(one: Optimizer, other: Optimizer) -> list[str]:
    expected, found = contents(one), contents(other)
    assert expected.keys() == found.keys()
    return [
        name
        for name, tensors in expected.items()
        if not all(torch.equal(*pair) for pair in zip(tensors, found[name], strict=True))
    ]
