"""What a check is: it looks at one step of a training, at the moments that the step has."""

from __future__ import annotations

from typing import Protocol

from cuboid.parallel.parallelize import Engine
from cuboid.training.checks.words import Located
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult


class Check(Protocol):
    """Every rank has its own and calls the same methods in the same order."""

    def begin(self, engine: Engine, micro_batches: int) -> None:
        """Before the passes of a step."""

    def see_gradients(self, result: StepResult) -> None:
        """When the gradients are summed over all ranks, and before the update."""

    def detach(self) -> None:
        """When the step has been computed, also after an error: it looks on no longer."""

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        """After the update: what is wrong, the same on every rank. Ranks talk to each other here."""


class Looks:
    """Undoes what lets a check look on."""

    def begin(self, engine: Engine, micro_batches: int) -> None:
        """Nothing, where there is nothing to prepare."""

    def see_gradients(self, result: StepResult) -> None:
        """Nothing."""

    def detach(self) -> None:
        """Nothing."""
