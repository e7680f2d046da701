"""Jobs of the tests of precisions."""

from __future__ import annotations

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.apply import build_engine
from cuboid.spec.run import Run
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import train_step
from tests.parallel.cases import CPU


def steps(rank: int, run: Run) -> list[tuple[float, float, float, int]]:
    """Loss, gradient norm, loss scale and overflows so far of each step."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    seen = []
    for step in range(run.training.steps):
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, CPU)
        result = train_step(engine, optimizer, batches, run.learning_rate.peak)
        seen.append((result.loss, result.gradient_norm, result.loss_scale, result.overflows))
    return seen
