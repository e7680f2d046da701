"""The training loop of one rank."""

from __future__ import annotations

import time

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.apply import build_engine
from cuboid.spec.run import Run
from cuboid.train.learning_rate import learning_rate
from cuboid.train.metrics import Metrics
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import train_step


def train(run: Run, rank: int, device: torch.device, quiet: bool = False) -> float:
    """Train from the first step to the last; returns the last loss, the same on every rank."""
    torch.use_deterministic_algorithms(run.training.deterministic)
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    loss = float("nan")
    with Metrics(run, rank, quiet) as metrics:
        for step in range(run.training.steps):
            start = time.perf_counter()
            rate = learning_rate(run.learning_rate, step, run.training.steps)
            batches = micro_batches(source, run, step, engine.groups.coordinates.dp, device)
            result = train_step(engine, optimizer, batches, rate)
            loss = result.loss
            metrics.record(step, result, rate, time.perf_counter() - start, engine.pipeline.timing)
    return loss
