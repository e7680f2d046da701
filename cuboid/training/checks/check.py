"""What a check is: it looks at one step of a training, at the moments that the step has."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.parallelize import Engine
from cuboid.training.checks.turns import Look
from cuboid.training.checks.words import Located
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult


class Check(Protocol):
    """Every rank has its own and calls the same methods in the same order."""

    def begin(self, look: Look) -> None:
        """Before the passes of a step."""

    def see_gradients(self, result: StepResult) -> None:
        """When the gradients are summed over all ranks, and before the update."""

    def detach(self) -> None:
        """When the step has been computed, also after an error: it looks on no longer."""

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        """After the update: what is wrong, the same on every rank. Ranks talk to each other here."""


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in place of a method of one object; returns what undoes that, the last one first."""
    had = vars(owner).get(name)
    setattr(owner, name, wrapper)
    return lambda: delattr(owner, name) if had is None else setattr(owner, name, had)


def when_there(x: Tensor, keep: Callable[[Tensor], None]) -> None:
    """Call `keep` with the gradient of a tensor."""

    def hook(gradient: Tensor) -> None:
        keep(gradient.detach())

    x.register_hook(hook)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=256)
def sampled_places(size: int, device: torch.device) -> Tensor:
    """Of at most 64 elements, evenly over so many."""
    count = min(size, 64)
    return ((torch.arange(count) * size) // max(count, 1)).to(device)


def from_all(engine: Engine, found: list[Located]) -> list[Located]:
    """The first that each rank has found, told to all; mostly there is none, and one number travels."""
    world = engine.groups.world
    if world.handle is None:
        return found
    wrong = torch.tensor(float(len(found)), device=engine.device)
    dist.all_reduce(wrong, group=world.handle)
    if not wrong.item():
        return []
    everybody: list[list[Located]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everybody, found[:1], group=world.handle)
    return [each for own in everybody for each in own]


class Looks:
    """Undoes what lets a check look on."""

    def begin(self, look: Look) -> None:
        """Nothing, where there is nothing to prepare."""

    def see_gradients(self, result: StepResult) -> None:
        """Nothing."""

    def detach(self) -> None:
        """Nothing."""
