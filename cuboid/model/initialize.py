"""Initial weights that depend on the seed and the parameter's name, and on nothing else.

Each parameter, and each expert of one that stacks them, is drawn as the full tensor from a generator of its own and
sliced afterwards, so every layout starts from the same bits (invariant 1)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cuboid.spec.model import ModelSpec

InitialTensor = Callable[[ModelSpec, str, tuple[int, ...], int, range | None], Tensor]
"""Draws a full tensor, or some of its experts, from the model, its name, its shape and the seed."""


def initial_tensor(
    model: ModelSpec, name: str, shape: tuple[int, ...], seed: int, experts: range | None = None
) -> Tensor:
    """The full initial value of the parameter `name`, float32 on the CPU; of stacked experts only those asked for."""
    kind = name.rsplit(".", 2)[-2:]
    if kind[1] == "bias":
        return torch.zeros(shape)
    if kind[0].endswith("norm"):
        return torch.ones(shape)
    # Projections that write into the residual stream are drawn smaller, so that its variance does not grow with depth.
    into_residual = name != "head.output.weight" and name.endswith((".output.weight", ".down.weight", "experts.down"))
    deviation = model.initial_std / math.sqrt(2 * model.layers) if into_residual else model.initial_std
    if kind[0] == "experts":
        wanted = range(shape[0]) if experts is None else experts
        return torch.stack([_drawn(f"{seed}/{name}/{expert}", shape[1:], deviation) for expert in wanted])
    return _drawn(f"{seed}/{name}", shape, deviation)


def _drawn(key: str, shape: tuple[int, ...], deviation: float) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def initialize(model: ModelSpec, module: nn.Module, seed: int) -> None:
    """Fill a whole single-device model."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_tensor(model, name, tuple(parameter.shape), seed))
