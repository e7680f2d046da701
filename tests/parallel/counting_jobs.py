"""A job that counts what a rank exchanges in two steps."""

from __future__ import annotations

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.apply import build_engine
from cuboid.plan.exchanges import predicted_ledger
from cuboid.spec.ledger import differences
from cuboid.spec.run import Run
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import train_step
from tests.parallel.cases import CPU


def difference(rank: int, run: Run) -> list[str]:
    """Where any step of a rank differs from the planner's ledger."""
    engine = build_engine(run, rank, CPU)
    assert engine.ledger is not None
    optimizer = Optimizer(engine, run.optimizer)
    found: list[str] = []
    for step in range(2):
        batches = micro_batches(make_source(run), run, step, engine.groups.coordinates.dp, CPU)
        train_step(engine, optimizer, batches, 1e-3)
        found += differences(engine.ledger.take(), predicted_ledger(run, rank))
    return found
