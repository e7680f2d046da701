"""Single-rank stand-ins for tensor-parallel collectives (`cuboid probe --rank`): copies of what this rank has, and
their sum. They are opaque to the compiler, as real collectives are, so that a block saves the same activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation


@operation("cuboid::imagined_gather")
def imagined_gather(x: Tensor, ranks: int) -> Tensor:
    return x.repeat(ranks, 1)


@torch.library.register_fake("cuboid::imagined_gather")  # type: ignore[untyped-decorator]
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] * ranks, x.shape[1])


@operation("cuboid::imagined_scatter")
def imagined_scatter(x: Tensor, ranks: int) -> Tensor:
    return x.unflatten(0, (ranks, -1)).sum(0)


@torch.library.register_fake("cuboid::imagined_scatter")  # type: ignore[untyped-decorator]
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] // ranks, x.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.ranks = inputs[1]


torch.library.register_autograd(
    "cuboid::imagined_gather",
    lambda ctx, gradient: (imagined_scatter(gradient, ctx.ranks), None),
    setup_context=_remember,
)
torch.library.register_autograd(
    "cuboid::imagined_scatter",
    lambda ctx, gradient: (imagined_gather(gradient, ctx.ranks), None),
    setup_context=_remember,
)
