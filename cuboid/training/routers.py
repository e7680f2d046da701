"""The routers after a step: their loads kept, their biases moved, their statistics told.

`experts.jsonl` in the run folder has the load of every expert: a row for a window of steps, `loads` by layer in percent
of the mean expert's, rounded up, so that 0 is an expert without a single token. There are at most `WINDOWS` rows,
however long the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cuboid.model.load_balancing import moved_bias
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.parallelize import Engine
from cuboid.spec.run import Run
from cuboid.spec.sharding import BALANCES
from cuboid.training.run_folder import EXPERTS, Rows

WINDOWS = 200
DEAD_STEPS = 25
"""An expert without a token for so many steps is dead: nothing it could learn from comes to it;"""
DEAD_TOKENS = 50.0
"""if the mean expert of its layer had this many meanwhile."""


def summed_statistics(engine: Engine) -> Tensor | None:
    """Of all routers over the global batch, the same on every rank: each saw tokens of its own."""
    if engine.balance is None:
        return None
    # (layers with experts, experts + 3), over the world: a layer's row is zero on ranks of other stages.
    return all_reduce(engine.balance.statistics.clone(), engine.groups.world)


@torch.no_grad()
def rebalance(engine: Engine, statistics: Tensor, finite: Tensor) -> None:
    """Experts with less than their share of the global batch become easier to choose, the others harder: by their bias,
    and by the load-balancing loss of the next step. `finite`: false skips the step."""
    mixture = engine.run.model.mixture
    assert mixture is not None and engine.balance is not None
    engine.balance.end_step(statistics, finite)
    if not mixture.bias_rate:
        return
    for unit in engine.units:
        if unit.name.endswith(BALANCES):
            layer = int(unit.name.split(".")[1])
            # (experts,): assignments in the global batch. Times 0, where a step is skipped, all are at the mean.
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
    dead: int = 0
    """Experts of all layers."""

    @property
    def numbers(self) -> dict[str, float]:
        """For trackers, which take single numbers."""
        told = {"balance_loss": self.balance_loss, "z_loss": self.z_loss, "dropped": self.dropped}
        told |= {"largest_load": max(self.largest_load), "dead": self.dead}
        return {f"routers/{name}": value for name, value in told.items() if value is not None}


class DeadExperts:
    """Which experts are dead, from the steps since the run started or resumed."""

    def __init__(self) -> None:
        self._steps: Tensor | float = 0.0
        self._missed: Tensor | float = 0.0
        """Tokens that the mean expert had since this one had its last."""

    def add(self, asked: Tensor) -> Tensor:
        """`asked`: assignments of a step by layer and expert. Returns the same of booleans."""
        # (layers, experts). A single token sets both counts back to zero.
        idle = asked == 0
        self._steps = (self._steps + 1.0) * idle
        self._missed = (self._missed + asked.mean(1, keepdim=True)) * idle
        return (self._steps >= DEAD_STEPS) & (self._missed >= DEAD_TOKENS)


class ExpertLoads:
    """The load of every expert over time; of rank 0."""

    def __init__(self, run: Run, done: int) -> None:
        """Rows of the first `done` steps are kept."""
        mixture, training = run.model.mixture, run.training
        assert mixture is not None
        self._steps = training.steps
        # A million steps write no more rows than a thousand: a window grows with the run.
        self._every = max(run.output.log_every, math.ceil(training.steps / WINDOWS))
        self._rows = Rows(Path(run.output.folder) / EXPERTS, done)
        self._asked = torch.zeros(run.model.routed_layers, mixture.experts, dtype=torch.float64)
        self._dead = DeadExperts()
        self._first = done + 1

    def add(self, step: int, statistics: Tensor) -> Tensor:
        """`step`: counted from 1. Which experts are dead now."""
        asked = statistics[:, : self._asked.shape[1]]
        self._asked += asked
        if step % self._every == 0 or step == self._steps:
            mean = self._asked.mean(1, keepdim=True).clamp(min=1e-9)
            # Rounded up: 0 is said of an expert without a token, and of no other.
            loads = (100 * self._asked / mean).ceil().int().tolist()
            self._rows.append({"step": step, "first": self._first, "loads": loads})
            self._asked.zero_()
            self._first = step + 1
        return self._dead.add(asked)

    def close(self) -> None:
        self._rows.close()


def report(statistics: Tensor, run: Run, sequences: int, dead: int = 0) -> RouterReport:
    """`sequences`: of the global batch."""
    mixture, length = run.model.mixture, run.training.sequence
    assert mixture is not None
    # `sums`: (layers, 3), as `load_balancing.EXTRA` names them.
    asked, sums = statistics[:, : mixture.experts], statistics[:, mixture.experts :]
    mean = sums.mean(0)
    return RouterReport(
        balance_loss=mean[0].item() / sequences if mixture.balance_coefficient else None,
        z_loss=mean[1].item() / (sequences * length) if mixture.z_coefficient else None,
        dropped=int(sums[:, 2].sum()),
        largest_load=(asked.amax(1) / asked.mean(1)).tolist(),
        dead=dead,
    )
