"""What stands for an exchange of tokens where there are no other ranks (`cuboid probe --rank`): copies of what this
rank has, and their sum. To the compiler they are what collectives are to it: operations it neither joins with others
nor repeats, so that a block keeps and moves what it would between real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("cuboid::imagined_gather", mutates_args=())
def imagined_gather(x: Tensor, ranks: int) -> Tensor:
    return x.repeat(ranks, 1)


@imagined_gather.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] * ranks, x.shape[1])


@torch.library.custom_op("cuboid::imagined_scatter", mutates_args=())
def imagined_scatter(x: Tensor, ranks: int) -> Tensor:
    return x.unflatten(0, (ranks, -1)).sum(0)


@imagined_scatter.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] // ranks, x.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.ranks = inputs[1]


imagined_gather.register_autograd(
    lambda ctx, gradient: (imagined_scatter(gradient, ctx.ranks), None), setup_context=_remember
)
imagined_scatter.register_autograd(
    lambda ctx, gradient: (imagined_gather(gradient, ctx.ranks), None), setup_context=_remember
)
