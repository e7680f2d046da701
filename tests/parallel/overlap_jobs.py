"""What a rank starts in which order, as torch's own profiler saw it on real ranks."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.apply import build_engine
from cuboid.parallel.regions import REGIONS
from cuboid.spec.run import Run
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import train_step

CPU = torch.device("cpu")


def started(rank: int, run: Run, names: tuple[str, ...]) -> list[str]:
    """The regions, operations and collectives of a step whose names begin with one of these, in order of their start.
    It is the second step: what is compiled or connected in the first is not in the way."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    source, replica = make_source(run), engine.groups.coordinates.dp
    train_step(engine, optimizer, micro_batches(source, run, 0, replica, CPU), 1e-3)
    REGIONS.begin()
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            train_step(engine, optimizer, micro_batches(source, run, 1, replica, CPU), 1e-3)
    finally:
        REGIONS.end()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(names)]
