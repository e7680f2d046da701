"""What torch.compile does for a rank: one graph per block, and a loss that overwrites logits with their gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.model.precision import wide
from cuboid.model.rope import Positions
from cuboid.model.transformer import IGNORED, Block, Head
from cuboid.parallel.deferral import Deferral, accumulate
from cuboid.parallel.recompute import with_recompute
from cuboid.spec.run import Run


def is_compiled(run: Run, device: torch.device) -> bool:
    if run.training.compile == "auto":
        exact = run.training.deterministic or run.training.precision == "float64"
        return device.type == "cuda" and not exact
    return run.training.compile == "on"


class _Recomputed(nn.Module):
    """A block with its recomputation inside the compiled region, where the compiler sees what is kept."""

    def __init__(self, block: Block, kind: str) -> None:
        super().__init__()
        self.block = block
        self._run = with_recompute(block, kind)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        return self._run(x, positions)


def compiled_block(block: Block, recompute: str, whole: bool) -> Callable[..., Tensor]:
    """`whole`: the block computes alone, so one graph holds it all; else its collectives divide it."""
    module = _Recomputed(block, recompute) if recompute == "selective" else block
    module.compile(fullgraph=whole, dynamic=False)
    # What a full recomputation keeps is the block's input: nothing for the compiler to decide.
    return with_recompute(module, recompute) if recompute == "full" else module


def _magnifier(dtype: torch.dtype) -> float:
    """Probabilities of a large vocabulary are below what float16 holds."""
    return 1024.0 if dtype == torch.float16 else 1.0


def _loss_and_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed loss; `logits` become its gradient, magnified, in their own memory and precision."""
    exact = logits.to(wide(logits.dtype))
    counted = labels != IGNORED
    columns = labels.where(counted, 0).unsqueeze(1)
    total = torch.logsumexp(exact, 1, keepdim=True)
    losses = torch.where(counted, (total - exact.gather(1, columns)).squeeze(1), 0)
    hit = torch.arange(exact.shape[1], device=exact.device) == columns
    gradient = torch.where(counted.unsqueeze(1), (exact - total).exp() - hit.to(exact.dtype), 0)
    logits.copy_(gradient * _magnifier(logits.dtype))
    return losses.sum()


@cache
def _compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_loss_and_gradient, dynamic=False, fullgraph=True)


class _LeanLoss(torch.autograd.Function):
    """Product with the vocabulary and loss in one: the logits exist once, in the precision of the product."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, labels: Tensor, deferral: Deferral) -> Tensor:
        logits = x @ weight.t()
        loss = _compiled_loss()(logits, labels)
        context.save_for_backward(x, logits)
        context.weight, context.deferral = weight, deferral
        return loss

    @staticmethod
    def backward(context: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        x, gradient = context.saved_tensors
        weight, deferral = context.weight, context.deferral
        scale = (scale / _magnifier(x.dtype)).to(x.dtype)
        input_gradient = (gradient @ weight) * scale
        scaled = x * scale  # smaller than the logits' gradient, which the scale would otherwise have to pass over
        if not deferral.active:
            return input_gradient, gradient.t() @ scaled, None, None
        deferral.postpone(lambda: accumulate(weight, gradient.t() @ scaled))
        return input_gradient, None, None, None


def lean_loss(head: Head, x: Tensor, labels: Tensor, deferral: Deferral) -> Tensor:
    loss: Tensor = _LeanLoss.apply(head.norm(x), head.output.weight, labels.flatten(), deferral)
    return loss
