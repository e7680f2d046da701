"""What a check of a training step is: which methods it has, and when the step calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.parallelize import Engine
from cuboid.training.checks.located import Located
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult


class Check(Protocol):
    """Every rank has its own and calls the same methods in the same order."""

    def begin(self, sampled: SampledStep) -> None:
        """Before the passes of a step."""

    def see_gradients(self, result: StepResult) -> None:
        """When the gradients are summed over all ranks, and before the update."""

    def detach(self) -> None:
        """When the step has been computed, also after an error: removes the hooks."""

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        """After the update: what is wrong, the same on every rank. Ranks communicate here."""


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; returns a function that undoes it. Several are undone in reverse order."""
    had = vars(owner).get(name)
    setattr(owner, name, wrapper)
    return lambda: delattr(owner, name) if had is None else setattr(owner, name, had)


def on_gradient(x: Tensor, keep: Callable[[Tensor], None]) -> None:
    """Call `keep` with the gradient of a tensor."""

    def hook(gradient: Tensor) -> None:
        keep(gradient.detach())

    x.register_hook(hook)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=256)
def sampled_places(size: int, device: torch.device) -> Tensor:
    """Indices of at most 64 elements, evenly spaced among `size`."""
    count = min(size, 64)
    return ((torch.arange(count) * size) // max(count, 1)).to(device)


def found_by_all(engine: Engine, found: list[Located]) -> list[Located]:
    """The first error of each rank, on all ranks. Mostly there is none, and ranks communicate one number."""
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


class CheckDefaults:
    """A check that needs no hooks: it has only `judge` to write."""

    def begin(self, sampled: SampledStep) -> None:
        """Nothing."""

    def see_gradients(self, result: StepResult) -> None:
        """Nothing."""

    def detach(self) -> None:
        """Nothing."""
