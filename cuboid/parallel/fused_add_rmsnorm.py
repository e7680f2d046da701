"""RMSNorm whose backward pass also adds the gradient of the residual stream. One custom operation: Inductor would split
it into slower kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation
from cuboid.model.linear import Norm

MEMBERS = 16384
"""How many numbers a program of the kernel takes at a time, at most four rows."""


@operation("cuboid::norm_backward")
def norm_backward(
    gradient: Tensor, stream: Tensor, x: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`stream`: the gradient that comes back beside the norm. `inverse`: what rows were multiplied by. Returns the
    gradient of `x`, and that of the weight in parts that are still to be summed."""
    if not x.is_cuda:
        exact, normed = gradient.to(inverse.dtype), x.to(inverse.dtype) * inverse
        scaled = exact * weight
        along = (scaled * normed).mean(1, keepdim=True)
        result = stream + (inverse * (scaled - normed * along)).to(x.dtype)
        return result, (exact * normed).sum(0, keepdim=True)
    from cuboid.kernels.rmsnorm import norm_backward_rows

    x = x.contiguous()
    rows, columns = x.shape
    width, tile, each = _division(x)
    result, sums = torch.empty_like(x), _empty_sums(x, inverse)
    norm_backward_rows[(sums.shape[0],)](
        gradient.contiguous(),
        stream.contiguous(),
        x,
        inverse,
        weight,
        result,
        sums,
        rows,
        columns,
        each,
        TILE=tile,
        WIDTH=width,
        num_warps=8 if width <= 2048 else 16,
    )
    return result, sums


@torch.library.register_fake("cuboid::norm_backward")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, stream: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _empty_sums(x, inverse)


def _division(x: Tensor) -> tuple[int, int, int]:
    """Columns, made even; rows that a program takes at a time; all rows that it takes."""
    rows, columns = x.shape
    width = 1 << (columns - 1).bit_length()
    tile = min(4, max(1, MEMBERS // width))
    return width, tile, -(-rows // (2 * _multiprocessors(x.device) * tile)) * tile


def _empty_sums(x: Tensor, inverse: Tensor) -> Tensor:
    rows, columns = x.shape
    programs = -(-rows // _division(x)[2]) if x.is_cuda else 1
    return inverse.new_empty(programs, columns)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _FusedAddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, joins: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        # In three dimensions: a sum in two the compiler would put into the matmul that it comes of, which then copies
        # the stream first.
        stream = x.view_as(x) if joins is None else (x.unsqueeze(0) + joins.unsqueeze(0)).squeeze(0)
        exact = stream.float()
        inverse = torch.rsqrt(exact.pow(2).mean(1, keepdim=True) + epsilon)
        context.save_for_backward(stream, inverse, weight)
        context.fused = joins is not None
        return stream, (exact * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(context: Any, stream: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, weight = context.saved_tensors
        result, sums = norm_backward(gradient, stream, x, inverse, weight)
        return result, result if context.fused else None, sums.sum(0).to(weight.dtype), None


def branch(norm: Norm, x: Tensor, joins: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `transformer.branch`, of an RMS norm in float32 or less."""
    stream, normed = _FusedAddRmsNorm.apply(x, joins, norm.weight, norm.epsilon)
    return stream, normed
