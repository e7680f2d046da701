"""Cross-entropy, of logits whose vocabulary may be split over tensor ranks.

Beside it the z-loss, the square of log Σ exp(logits) times a coefficient: its gradient is part of that of the logits,
its value is kept apart.

Where the compiler helps, LM head and loss are fused: the logits exist once, in the precision of the matmul, and are
overwritten by their gradient. Elsewhere the same steps run one by one on a copy in float32 or wider."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.precision import wide
from cuboid.model.batch import IGNORED
from cuboid.model.split_backward import Deferral, accumulate
from cuboid.model.transformer import Head
from cuboid.parallel.collectives import all_reduce, all_reduce_maximum
from cuboid.parallel.groups import Group
from cuboid.parallel.tensor_region import Region
from cuboid.spec.sharding import vocabulary_rows


class ZLoss:
    """Its sum over the tokens of a step that this rank has seen, without the coefficient."""

    def __init__(self, coefficient: float, dtype: torch.dtype, device: torch.device) -> None:
        self.coefficient = coefficient
        self.summed = torch.zeros((), dtype=wide(dtype), device=device)
        """Keeps its memory: a CUDA graph adds to it."""

    def begin_step(self) -> None:
        self.summed.zero_()


def _exact(logits: Tensor) -> Tensor:
    return logits.to(wide(logits.dtype))


def _magnifier(dtype: torch.dtype) -> float:
    """Probabilities of a large vocabulary are below what float16 holds."""
    return 1024.0 if dtype == torch.float16 else 1.0


def _loss_and_gradient(logits: Tensor, labels: Tensor, coefficient: float) -> tuple[Tensor, Tensor | None]:
    """The summed loss and z-loss; `logits` become the gradient, magnified, in their own memory and precision."""
    exact = _exact(logits)
    counted = labels != IGNORED
    columns = labels.where(counted, 0).unsqueeze(1)
    total = torch.logsumexp(exact, 1, keepdim=True)
    losses = torch.where(counted, (total - exact.gather(1, columns)).squeeze(1), 0)
    hit = torch.arange(exact.shape[1], device=exact.device) == columns
    softmax, squares = (exact - total).exp(), None
    if coefficient:
        softmax = softmax * (1 + 2 * coefficient * total)
        squares = torch.where(counted, total.squeeze(1).square(), 0).sum()
    gradient = torch.where(counted.unsqueeze(1), softmax - hit.to(exact.dtype), 0)
    logits.copy_(gradient * _magnifier(logits.dtype))
    return losses.sum(), squares


def _loss_and_gradient_on_gpu(logits: Tensor, labels: Tensor, coefficient: float) -> tuple[Tensor, Tensor | None]:
    """As `_loss_and_gradient`, with less waiting for memory than the compiler finds."""
    from cuboid.kernels.triton_kernels import loss_and_gradient

    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    squares = torch.empty_like(losses) if coefficient else losses
    magnifier = _magnifier(logits.dtype)
    loss_and_gradient[(rows,)](
        logits,
        labels,
        losses,
        squares,
        columns,
        magnifier,
        coefficient,
        IGNORED=IGNORED,
        Z_LOSS=coefficient > 0,
        STRIPS=8,
        STRIP=8192,
        num_warps=32,
    )
    return losses.sum(), squares.sum() if coefficient else None


def _loss_of_whole_rows(logits: Tensor, labels: Tensor, z_loss: ZLoss | None) -> Tensor:
    on_gpu = logits.is_cuda and wide(logits.dtype) == torch.float32
    compute = _loss_and_gradient_on_gpu if on_gpu else _compiled(_loss_and_gradient)
    loss: Tensor
    loss, squares = compute(logits, labels, 0.0 if z_loss is None else z_loss.coefficient)
    if z_loss is not None and squares is not None:
        z_loss.summed += squares
    return loss


def _without_padding(logits: Tensor, rows: int) -> Tensor:
    """Columns that only pad the vocabulary weigh nothing; a rank may have no others."""
    exact = _exact(logits)
    if rows == exact.shape[1]:
        return exact
    return exact.masked_fill(torch.arange(exact.shape[1], device=exact.device) >= rows, -torch.inf)


def _peaks(logits: Tensor, rows: int) -> Tensor:
    return _without_padding(logits, rows).amax(1)


def _sums(logits: Tensor, labels: Tensor, peaks: Tensor, first: int, rows: int) -> Tensor:
    """Of the columns held here: sums of exponentials, and the labels' own logits, both beside the peaks."""
    lowered = _without_padding(logits, rows) - peaks.unsqueeze(1)
    columns = labels - first
    held = (labels != IGNORED) & (columns >= 0) & (columns < rows)
    target = lowered.gather(1, columns.where(held, 0).unsqueeze(1)).squeeze(1)
    return torch.stack((lowered.exp_().sum(1), torch.where(held, target, 0)))


def _overwrite(logits: Tensor, labels: Tensor, peaks: Tensor, totals: Tensor, first: int, rows: int) -> None:
    """`logits` become the gradient, magnified; columns that only pad the vocabulary have none."""
    column = torch.arange(logits.shape[1], device=logits.device)
    # In place: uncompiled, each operation would make another tensor as large as the logits.
    gradient = _exact(logits).sub_(peaks.unsqueeze(1)).exp_().div_(totals.unsqueeze(1))
    gradient.add_(column == (labels - first).unsqueeze(1), alpha=-1)
    gradient.masked_fill_((labels == IGNORED).unsqueeze(1) | (column >= rows), 0)
    logits.copy_(gradient.mul_(_magnifier(logits.dtype)))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _split_loss(
    logits: Tensor,
    labels: Tensor,
    vocabulary: int,
    group: Group,
    z_loss: ZLoss | None,
    compiled: Callable[..., Any] = _compiled,
) -> Tensor:
    """As `_loss_and_gradient`, of logits whose columns are split; they are never gathered."""
    first, rows = vocabulary_rows(vocabulary, group.size, group.index)
    # Softmax over a split vocabulary: a maximum (tokens,), so that no exponential overflows, then sums of exponentials
    # and the target's logit (2, tokens), to which ranks without it add 0. No rank sees another's logits: 12 bytes a
    # token travel, not vocabulary × 2.
    peaks = all_reduce_maximum(compiled(_peaks)(logits, rows), group)
    totals, target = all_reduce(compiled(_sums)(logits, labels, peaks, first, rows), group).unbind()
    counted, divisors = labels != IGNORED, totals
    if z_loss is not None:
        # Of the whole vocabulary, and so equal on all ranks. The gradient of its square is a multiple of the softmax.
        logarithms = totals.log() + peaks
        z_loss.summed += torch.where(counted, logarithms.square(), 0).sum()
        divisors = totals / (1 + 2 * z_loss.coefficient * logarithms)
    compiled(_overwrite)(logits, labels, peaks, divisors, first, rows)
    return torch.where(counted, totals.log() - target, 0).sum()


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, labels: Tensor, vocabulary: int, group: Group, z_loss: ZLoss | None
    ) -> Tensor:
        exact = logits.to(wide(logits.dtype), copy=True)
        loss = _split_loss(exact, labels, vocabulary, group, z_loss, _unchanged)
        context.save_for_backward(exact)  # which holds the gradient by now
        return loss

    @staticmethod
    def backward(context: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = context.saved_tensors
        return gradient * scale, None, None, None, None


def split_cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: int, group: Group, z_loss: ZLoss | None = None
) -> Tensor:
    """Summed, over logits whose columns are split over the ranks of `group`."""
    loss: Tensor = _SplitCrossEntropy.apply(logits, labels, vocabulary, group, z_loss)
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: int,
        group: Group,
        region: Region | None,
        deferral: Deferral,
        z_loss: ZLoss | None,
        cap: float,
    ) -> Tensor:
        context.region = region
        x = x if region is None else region.gather(x)
        logits = x @ weight.t()
        slope = None
        if cap:
            slope = 1 - logits.div_(cap).tanh_().square()
            logits.mul_(cap)
        if group.size == 1:
            loss = _loss_of_whole_rows(logits, labels, z_loss)
        else:
            loss = _split_loss(logits, labels, vocabulary, group, z_loss)
        if slope is not None:
            logits.mul_(slope)
        # `logits` hold their own gradient by now: one buffer of tokens × vocabulary / tp, in the matmul's precision.
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
        nothing = (None, None, None, None, None, None, None)
        summed = None if context.region is None else context.region.start_sum(input_gradient)
        weight_gradient = None if deferral.active else gradient.t() @ scaled  # under the collective
        if deferral.active:
            deferral.postpone(lambda: accumulate(weight, gradient.t() @ scaled))
        return input_gradient if summed is None else summed.wait(), weight_gradient, *nothing


def fused_cross_entropy(
    head: Head,
    x: Tensor,
    labels: Tensor,
    vocabulary: int,
    group: Group,
    region: Region | None,
    deferral: Deferral,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """`group`: the tensor ranks. `region`: where they divide the work."""
    weight, labels = head.output.weight, labels.flatten()
    rest = (vocabulary, group, region, deferral, z_loss, head.cap)
    loss: Tensor = _FusedCrossEntropy.apply(head.norm(x), weight, labels, *rest)
    return loss
