"""One optimizer step of one rank: count tokens, run the pipeline, finish the gradients, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cuboid.model.batch import MicroBatch
from cuboid.model.transformer import IGNORED
from cuboid.parallel.apply import Engine
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.gradients import finish_gradients, squared_norm
from cuboid.train.optimizer import Optimizer


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Sum of token losses / labelled tokens, over the global batch."""
    gradient_norm: float
    tokens: int
    """Labelled tokens of the global batch."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def compute_gradients(engine: Engine, micro_batches: list[MicroBatch]) -> StepResult:
    """After this the pieces hold the gradient of (sum of token losses / labelled tokens) over the global batch."""
    shares = engine.share(micro_batches)
    counted = torch.tensor(sum(int((share.labels != IGNORED).sum()) for share in shares), device=engine.device)
    tokens = int(all_reduce(counted, engine.groups.data))
    for unit in engine.units:
        unit.begin_step(len(micro_batches))
    dtype = engine.units[0].accumulate
    scale = torch.tensor(1.0 / max(tokens, 1), dtype=dtype, device=engine.device)
    summed_loss = engine.pipeline.run(shares, scale)
    finish_gradients(engine)
    own_loss = summed_loss if engine.holds_loss else torch.zeros_like(summed_loss)
    loss, square = all_reduce(torch.stack((own_loss, squared_norm(engine))), engine.groups.world).tolist()
    return StepResult(loss / max(tokens, 1), math.sqrt(square) if square >= 0 else math.nan, tokens)


def train_step(
    engine: Engine,
    optimizer: Optimizer,
    micro_batches: list[MicroBatch],
    learning_rate: float,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """A step whose loss or gradient is not finite is left out on every rank alike: all see the same numbers."""
    result = compute_gradients(engine, micro_batches)
    if before_update is not None:
        before_update()
    if result.is_finite:
        optimizer.step(learning_rate, result.gradient_norm, engine.run.training.gradient_clip)
    return result
