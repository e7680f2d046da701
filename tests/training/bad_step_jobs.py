"""Jobs on the ranks of the pool whose steps go wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cuboid.data.corpus import Origin, Sample
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import Deviation, deviations, flip_bit
from cuboid.training.step import train_step
from cuboid.training.trainer import Outcome, Trainer

CPU = torch.device("cpu")


class Poisoned(Trainer):
    """Meets a number that is none in its weights, on one rank, whenever it trains on one of these batches."""

    batches: frozenset[int] = frozenset()
    passing: frozenset[int] = frozenset()
    """Those that are bad the first time only."""
    culprit = 0

    def _start_step(self) -> None:
        poisons = self.engine.groups.world.index == self.culprit
        batch = self.engine.course.batch(self.done)
        with self._poison() if poisons and batch in self.batches else _nothing():
            super()._start_step()
        self.batches -= self.passing & {batch}

    @contextmanager
    def _poison(self) -> Iterator[None]:
        weight = next(unit for unit in self.engine.units if unit.name.startswith("layers.")).master
        held = weight[0].clone()
        weight[0] = math.nan
        yield
        assert math.isnan(weight[0]), "the update was skipped"
        weight[0] = held


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def train_poisoned(
    rank: int, run: Run, batches: frozenset[int], culprit: int, passing: frozenset[int] = frozenset()
) -> Outcome:
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    trainer = Poisoned(run, rank, CPU, quiet=True)
    trainer.batches, trainer.culprit, trainer.passing = batches, culprit, passing
    return trainer.train()


def flipped(rank: int, run: Run, culprit: int, name: str) -> tuple[list[Deviation], list[Deviation], list[Deviation]]:
    """What replicas say after two steps, after one bit of one rank's memory flipped, and after a step more."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)

    def step(number: int) -> list[Deviation]:
        batches = micro_batches(source, run, number, engine.groups.coordinates.dp, CPU)
        train_step(engine, optimizer, batches, 1e-3)
        return deviations(engine, optimizer)

    step(0)
    sound = step(1)
    if rank == culprit:
        (optimizer_shard,) = [
            optimizer_shard for optimizer_shard in optimizer.optimizer_shards if optimizer_shard.part.name == name
        ][:1]
        flip_bit(optimizer_shard.master)
    return sound, deviations(engine, optimizer), step(2)


def train_without(rank: int, run: Run, batches: list[int]) -> float:
    """As if the batches had never been there."""
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    trainer = Trainer(run, rank, CPU, quiet=True)
    for batch in batches:
        trainer.engine.course.skip(batch)
    return trainer.train().loss


class Monotonous:
    """One token for ever, but for one batch of all tokens there are."""

    def __init__(self, run: Run, noise: int) -> None:
        self._run, self._noise = run, noise

    def at(self, position: int) -> Sample:
        training = self._run.training
        tokens = torch.full((training.sequence + 1,), 7)
        if position // training.global_batch == self._noise:
            tokens = torch.arange(position, position + training.sequence + 1) * 31 % self._run.model.vocab
        return tokens[:-1], tokens[1:]

    def documents_at(self, position: int) -> Tensor:
        raise NotImplementedError

    def origin(self, position: int) -> Origin | None:
        return Origin("noise", position)


def train_on_noise(rank: int, run: Run, noise: int) -> Outcome:
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    trainer = Trainer(run, rank, CPU, quiet=True)
    trainer.source = Monotonous(run, noise)
    return trainer.train()
