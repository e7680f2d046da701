"""What a rank of a model of one's own really holds at its fullest moment, counted tensor by tensor."""

from __future__ import annotations

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.memory import Tally, held, storages
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step


def measured_peak(rank: int, run: Run) -> int:
    device = torch.device("cpu")
    engine = build_engine(run, rank, device)
    optimizer, source = Optimizer(engine, run.optimizer), make_source(run)
    tally = Tally(storages(engine.units, optimizer), lambda: sum(held(engine.units, optimizer).values()))
    batches = [micro_batches(source, run, step, engine.groups.coordinates.dp, device) for step in range(2)]
    train_step(engine, optimizer, batches[0], 1e-3)
    with tally:
        train_step(engine, optimizer, batches[1], 1e-3)
    return tally.peak
