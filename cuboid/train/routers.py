"""The routers after a step: their loads kept, their biases moved, their statistics told."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.model.balance import moved_bias
from cuboid.parallel.apply import Engine
from cuboid.parallel.collectives import all_reduce
from cuboid.plan.parameters import BALANCE
from cuboid.spec.run import Run


def summed_statistics(engine: Engine) -> Tensor | None:
    """Of all routers over the global batch, the same on every rank: each saw tokens of its own."""
    if engine.balance is None:
        return None
    return all_reduce(engine.balance.statistics.clone(), engine.groups.world)


@torch.no_grad()
def rebalance(engine: Engine, statistics: Tensor, finite: Tensor) -> None:
    """Experts with less than their share of the global batch become easier to choose, the others harder: by their bias,
    and by the load-balancing loss of the next step. `finite`: false leaves the step out."""
    mixture = engine.run.model.mixture
    assert mixture is not None and engine.balance is not None
    engine.balance.end_step(statistics, finite)
    if not mixture.bias_rate:
        return
    for unit in engine.units:
        if unit.name.endswith(BALANCE):
            layer = int(unit.name.split(".")[1])
            asked = statistics[layer - mixture.first_dense_layers, : mixture.experts]
            unit.master.copy_(moved_bias(unit.master, asked * finite, mixture.bias_rate))


@dataclass(frozen=True)
class RouterReport:
    """What a row of metrics says of the routers, over the global batch."""

    balance_loss: float | None
    """Mean over sequences and layers, 1 at perfect balance; None where it takes no part in training."""
    z_loss: float | None
    """Mean over tokens and layers; None where it takes no part in training."""
    dropped: int
    """Assignments for which an expert had no room."""
    largest_load: list[float]
    """By layer with experts: assignments of the busiest expert over those of the mean one."""


def report(statistics: Tensor, run: Run) -> RouterReport:
    mixture, training = run.model.mixture, run.training
    assert mixture is not None
    asked, sums = statistics[:, : mixture.experts], statistics[:, mixture.experts :]
    mean = sums.mean(0)
    return RouterReport(
        balance_loss=mean[0].item() / training.global_batch if mixture.balance_coefficient else None,
        z_loss=mean[1].item() / (training.global_batch * training.sequence) if mixture.z_coefficient else None,
        dropped=int(sums[:, 2].sum()),
        largest_load=(asked.amax(1) / asked.mean(1)).tolist(),
    )
