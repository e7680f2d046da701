"""Jobs of the tests of recipes that run on the ranks of the pool."""

from __future__ import annotations

import torch

from cuboid.checkpoint.state import AVERAGE
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import evaluate, train_step

CPU = torch.device("cpu")


def average_beside_weights(rank: int, run: Run) -> tuple[torch.dtype, float]:
    """Of what this rank keeps: the dtype of averages, and by how much they differ from those of its master weights."""
    engine = build_engine(run, rank, CPU)
    optimizer, source, replica = Optimizer(engine, run.optimizer), make_source(run), engine.groups.coordinates.dp
    expected = [shard.master.double() for shard in optimizer.optimizer_shards]
    for step in range(3):
        train_step(engine, optimizer, micro_batches(source, run, step, replica, CPU), run.learning_rate.peak)
        masters = [shard.master.double() for shard in optimizer.optimizer_shards]
        expected = [0.7 * mean + 0.3 * now for mean, now in zip(expected, masters, strict=True)]
    found = [optimizer.state_of(shard)[AVERAGE] for shard in optimizer.optimizer_shards]
    pairs = zip(found, expected, strict=True)
    return found[0].dtype, max((seen.double() - mean).abs().max().item() for seen, mean in pairs if len(mean))


def average_as_traced(rank: int, run: Run) -> tuple[torch.dtype, float]:
    """`average_beside_weights`, as the compiler traces it, run operation by operation."""
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend="eager"):
        return average_beside_weights(rank, run)


def evaluated(rank: int, run: Run) -> tuple[float | None, float | None, list[float], list[float]]:
    """After two steps: the loss of average and weights on the first batch, and what this rank keeps before and after
    that evaluation."""
    engine = build_engine(run, rank, CPU)
    optimizer, source, replica = Optimizer(engine, run.optimizer), make_source(run), engine.groups.coordinates.dp

    def step(number: int) -> float:
        batches = micro_batches(source, run, number, replica, CPU)
        return train_step(engine, optimizer, batches, run.learning_rate.peak).loss

    def kept() -> list[float]:
        held = [(shard.master, optimizer.state_of(shard)[AVERAGE]) for shard in optimizer.optimizer_shards]
        return [each.double().sum().item() for pair in held for each in pair]

    step(0), step(1)
    before = kept()
    with optimizer.averaged():
        averaged = evaluate(engine, [micro_batches(source, run, 0, replica, CPU)])
    plain = evaluate(engine, [micro_batches(source, run, 0, replica, CPU)])
    return averaged, plain, before, kept()


def state_bytes(rank: int, run: Run) -> int:
    return Optimizer(build_engine(run, rank, CPU), run.optimizer).state_bytes()
