"""Grouped matmuls of routed experts in fp8 (e4m3): forward and input gradient, with a scale for each row of the inputs
and for each row that is multiplied of each expert's weight. Weight gradients stay in 16 bits: what they sum over are
an expert's tokens, a number that no kernel's blocks divide, and cutting them to size costs what 8 bits save.

Where rows come in 16 bits and in 8, one kernel makes both, because the other way is a pass over memory more: the one
that permutes rows, SwiGLU, its gradient, and the gradient of the combination. Gate and up are one matmul: their weights
are written anew in any case, so they are written side by side.

Experts are not compiled, so kernels of our own quantise on a GPU. A CPU multiplies the same rounded numbers in
float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.fp8_block import VALUES, exponents_of
from cuboid.model.moe import Experts, grouped_matmul, grouped_outer, swiglu
from cuboid.model.router import LONGEST, Quantised, take_rounded
from cuboid.model.split_backward import Deferral, accumulate, deferrable_grouped_matmul

TALL, WIDE = 128, 64
"""Rows and columns that a program transposes at a time."""


def multiply_experts_in_fp8(experts: Experts, deferral: Deferral) -> None:
    experts.matmul = deferrable_grouped_matmul(deferral, fp8_grouped_matmul)
    if experts.swiglu is not swiglu or experts.gate is None or experts.up_bias is not None:
        return

    def whole(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
        y: Tensor = _SwigluExperts.apply(x, gate, up, down, counts, deferral)
        return y

    experts.whole = whole


def fp8_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """As `moe.grouped_matmul`."""
    return _multiply(quantise_long(x), quantise_long(weight), counts, x.dtype)


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor, deferral: Deferral
    ) -> Tensor:
        fused = _multiply(_rounded(x), quantise_pair(gate, up), counts, x.dtype)
        inner, rounded = _swiglu(fused)
        context.save_for_backward(x, fused, inner, counts)
        context.weights, context.deferral = (gate, up, down), deferral
        return _multiply(rounded, quantise_long(down), counts, x.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, fused, inner, counts = context.saved_tensors
        (gate, up, down), deferral = context.weights, context.deferral
        rounded = _rounded(gradient)
        gradient = gradient.contiguous()
        of_inner = _multiply(rounded, quantise_long(down.transpose(1, 2)), counts, x.dtype)
        both, rounded = _swiglu_gradients(of_inner, fused)
        pair = quantise_pair(gate.transpose(1, 2), up.transpose(1, 2))
        input_gradient = _multiply(rounded, pair, counts, x.dtype)
        left, right = both.chunk(2, dim=1)
        factors = ((gate, left, x), (up, right, x), (down, gradient, inner))
        if not deferral.active:
            return input_gradient, *(grouped_outer(y, rows, counts) for _, y, rows in factors), None, None

        def later() -> None:
            for weight, y, rows in factors:
                accumulate(weight, grouped_outer(y, rows, counts))

        deferral.postpone(later)
        return input_gradient, None, None, None, None, None


def _rounded(rows: Tensor) -> Quantised:
    return take_rounded(rows) or quantise_long(rows)


def _swiglu(fused: Tensor) -> tuple[Tensor, Quantised]:
    """Of gate and up side by side; in 16 bits, and rounded."""
    if not _has_kernels(fused):
        inner = swiglu(*fused.chunk(2, dim=1))
        return inner, quantise_long(inner)
    from cuboid.kernels import triton_fp8

    rows, width = fused.shape[0], fused.shape[1] // 2
    inner = fused.new_empty(rows, width)
    values, scales = _room_for(inner.shape, inner.device)
    if fused.numel():
        tall, block = _tile(width)
        triton_fp8.swiglu_rounded[(-(-rows // tall),)](
            fused, inner, values, scales, rows, width, TALL=tall, BLOCK=block
        )
    return inner, (values, scales)


def _swiglu_gradients(gradient: Tensor, fused: Tensor) -> tuple[Tensor, Quantised]:
    """Of gate and up side by side; in 16 bits, and rounded."""
    if not _has_kernels(fused):
        with torch.enable_grad():
            halves = [half.detach().requires_grad_() for half in fused.chunk(2, dim=1)]
            gradients = torch.autograd.grad(swiglu(*halves), halves, gradient)
        both = torch.cat(gradients, dim=1)
        return both, quantise_long(both)
    from cuboid.kernels import triton_fp8

    rows, width = fused.shape[0], fused.shape[1] // 2
    both = torch.empty_like(fused)
    values, scales = _room_for(both.shape, both.device)
    if fused.numel():
        tall, block = _tile(width)
        triton_fp8.swiglu_gradients_rounded[(-(-rows // tall),)](
            gradient.contiguous(), fused, both, values, scales, rows, width, TALL=tall, BLOCK=block
        )
    return both, (values, scales)


def _tile(width: int) -> tuple[int, int]:
    """Rows of a program, and columns, which are all."""
    block = 1 << (width - 1).bit_length()
    return max(1, 4096 // block), block


def _multiply(rows: Quantised, weight: Quantised, counts: Tensor, dtype: torch.dtype) -> Tensor:
    (values, scales), (weights, weight_scales) = rows, weight
    if values.is_cuda and dtype == torch.bfloat16 and not (values.shape[1] % 16 or weights.shape[1] % 16):
        by_row = functional.ScalingType.RowWise
        offsets = counts.cumsum(0, dtype=torch.int32)
        factors = (values, weights.transpose(1, 2), scales, by_row, weight_scales, by_row)
        # Sums within the multipliers: without them the kernel is slower than in 16 bits, 1.24 for 0.62 ms on an H200.
        more = {"offs": offsets, "output_dtype": dtype, "use_fast_accum": True}
        y: Tensor = functional.scaled_grouped_mm(*factors, **more)  # type: ignore[attr-defined,unused-ignore]
        return y
    exact = grouped_matmul(values.float() * scales.unsqueeze(-1), weights.float() * weight_scales.unsqueeze(-1), counts)
    return exact.to(dtype)


def quantise_long(x: Tensor) -> Quantised:
    """A weight of (experts, out, in) may be the transpose of one."""
    transposed = x.dim() == 3 and _is_transposed(x)
    if not _has_kernels(x):
        exponents = exponents_of(x.abs().amax(-1))
        return (x.float() * torch.exp2(-exponents.float()).unsqueeze(-1)).to(VALUES), torch.exp2(exponents.float())
    x = x if transposed else x.contiguous()
    values, scales = _room_for(x.shape, x.device)
    if x.numel() and transposed:
        _quantise_columns(x, x, values, scales, parts=1)
    elif x.numel():
        _quantise_rows(x, values, scales, high=1, spread=1, first=0)
    return values, scales


def quantise_pair(gate: Tensor, up: Tensor) -> Quantised:
    """Of two weights the one whose result is both results side by side: (experts, 2 out, in); or, if they are the
    transposes of weights, the one whose result is the sum of both: (experts, out, 2 in)."""
    joint = 2 if _is_transposed(gate) else 1
    if not _has_kernels(gate) or not gate.numel():
        return quantise_long(torch.cat([gate, up], dim=joint))
    if joint == 2:
        values, scales = _room_for((*gate.shape[:2], 2 * gate.shape[2]), gate.device)
        _quantise_columns(gate, up, values, scales, parts=2)
        return values, scales
    experts, rows, width = gate.shape
    values, scales = _room_for((experts, 2 * rows, width), gate.device)
    for number, weight in enumerate((gate, up)):
        _quantise_rows(weight.contiguous(), values, scales, high=rows, spread=2 * rows, first=number * rows)
    return values, scales


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.shape[-1] <= LONGEST


def _is_transposed(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def _room_for(shape: tuple[int, ...], device: torch.device) -> Quantised:
    values = torch.empty(shape, dtype=VALUES, device=device)
    return values, torch.empty(shape[:-1], dtype=torch.float32, device=device)


def _quantise_rows(x: Tensor, values: Tensor, scales: Tensor, high: int, spread: int, first: int) -> None:
    from cuboid.kernels import triton_fp8

    width = x.shape[-1]
    block = 1 << (width - 1).bit_length()
    triton_fp8.quantise_long_rows[(x.numel() // width,)](
        x, values, scales, width, high, spread, first, BLOCK=block, num_warps=4 if block <= 4096 else 8
    )


def _quantise_columns(x: Tensor, below: Tensor, values: Tensor, scales: Tensor, parts: int) -> None:
    """Of matrices that are seen as their transposes."""
    from cuboid.kernels import triton_fp8

    experts, columns, rows = x.shape
    grid = (-(-columns // WIDE), experts)
    triton_fp8.quantise_long_columns[grid](
        x, below, values, scales, rows, columns, PARTS=parts, TALL=TALL, WIDE=WIDE, num_warps=8
    )
