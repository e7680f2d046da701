"""Grouped matmuls of routed experts in fp8 (e4m3): forward and input gradient, with a scale for each row of the inputs,
for each row of each expert's weight, and one for the weight's transpose. Weight gradients stay in 16 bits: what they
sum over are an expert's tokens, a number that no kernel's blocks divide, and cutting them to size costs what 8 bits
save.

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

TALL, WIDE = 64, 128
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
    """As `moe.grouped_matmul`. The weight may be seen as its transpose."""
    if not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous():
        rounded = quantise_transposes((weight.transpose(1, 2),))
    else:
        rounded = quantise_long(weight)
    return _multiply(quantise_long(x), rounded, counts, x.dtype)


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor, deferral: Deferral
    ) -> Tensor:
        pair = quantise_pair(gate, up)
        fused = _multiply(_rounded(x), pair, counts, x.dtype)
        inner, rounded = _swiglu(fused)
        last = quantise_long(down)
        context.save_for_backward(x, fused, inner, counts, pair[1], last[1])
        context.weights, context.deferral = (gate, up, down), deferral
        return _multiply(rounded, last, counts, x.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, fused, inner, counts, pair_scales, last_scales = context.saved_tensors
        (gate, up, down), deferral = context.weights, context.deferral
        rounded = _rounded(gradient)
        gradient = gradient.contiguous()
        of_inner = _multiply(rounded, quantise_transposes((down,), last_scales), counts, x.dtype)
        both, rounded = _swiglu_gradients(of_inner, fused)
        input_gradient = _multiply(rounded, quantise_transposes((gate, up), pair_scales), counts, x.dtype)
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
        tile = _tile(width)
        triton_fp8.swiglu_rounded[(-(-rows // tile["TALL"]),)](fused, inner, values, scales, rows, width, **tile)
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
        tile = _tile(width)
        triton_fp8.swiglu_gradients_rounded[(-(-rows // tile["TALL"]),)](
            gradient.contiguous(), fused, both, values, scales, rows, width, **tile
        )
    return both, (values, scales)


def _tile(width: int) -> dict[str, int]:
    """Rows of a program, and columns, which are all."""
    block = 1 << (width - 1).bit_length()
    return {"TALL": max(1, 4096 // block), "BLOCK": block, "num_warps": 8}


def _multiply(rows: Quantised, weight: Quantised, counts: Tensor, dtype: torch.dtype) -> Tensor:
    (values, scales), (weights, weight_scales) = rows, weight
    if values.is_cuda and dtype == torch.bfloat16 and not (values.shape[1] % 16 or weights.shape[1] % 16):
        by_row = functional.ScalingType.RowWise
        offsets = counts.cumsum(0, dtype=torch.int32)
        factors = (values, weights.transpose(1, 2), scales, by_row, weight_scales, by_row)
        # Without fast accumulation the kernel is slower than in 16 bits, 1.24 ms beside 0.62 on an H200.
        more = {"offs": offsets, "output_dtype": dtype, "use_fast_accum": True}
        y: Tensor = functional.scaled_grouped_mm(*factors, **more)  # type: ignore[attr-defined,unused-ignore]
        return y
    exact = grouped_matmul(values.float() * scales.unsqueeze(-1), weights.float() * weight_scales.unsqueeze(-1), counts)
    return exact.to(dtype)


def quantise_long(x: Tensor) -> Quantised:
    """Rows, each with a scale. Those of a weight are (experts, out)."""
    if not _has_kernels(x):
        exponents = exponents_of(x.abs().amax(-1))
        return (x.float() * torch.exp2(-exponents.float()).unsqueeze(-1)).to(VALUES), torch.exp2(exponents.float())
    values, scales = _room_for(x.shape, x.device)
    _quantise_rows(x.contiguous(), values, scales, high=1, spread=1, first=0)
    return values, scales


def quantise_pair(gate: Tensor, up: Tensor) -> Quantised:
    """Of two weights the one whose result is both results side by side: (experts, 2 out, in)."""
    if not _has_kernels(gate):
        return quantise_long(torch.cat([gate, up], dim=1))
    experts, rows, width = gate.shape
    values, scales = _room_for((experts, 2 * rows, width), gate.device)
    for number, weight in enumerate((gate, up)):
        _quantise_rows(weight.contiguous(), values, scales, high=rows, spread=2 * rows, first=number * rows)
    return values, scales


def quantise_transposes(weights: tuple[Tensor, ...], scales: Tensor | None = None) -> Quantised:
    """Of one weight its transpose, (experts, in, out); of two the transpose of one above the other. Each expert has one
    scale: the largest of `scales`, those of rows, so that no pass over memory looks for it. Numbers of 8 bits have an
    exponent of their own, and lose nothing by a larger scale unless they are tens of thousands of times smaller than
    the largest."""
    if scales is None:
        peaks = [torch.linalg.vector_norm(weight, torch.inf, dim=(1, 2)) for weight in weights]
        scales = torch.exp2(exponents_of(torch.stack(peaks, dim=1)).float())
    largest = scales.amax(1)
    experts, rows, columns = weights[0].shape
    length = rows * len(weights)
    each = largest.unsqueeze(1).expand(experts, columns).contiguous()
    if not _has_kernels(weights[0]):
        whole = torch.cat(weights, dim=1).transpose(1, 2)
        return (whole.float() / largest.view(-1, 1, 1)).to(VALUES).contiguous(), each
    from cuboid.kernels import triton_fp8

    values = torch.empty((experts, columns, length), dtype=VALUES, device=largest.device)
    grid = (-(-columns // WIDE), -(-rows // TALL), experts)
    for number, weight in enumerate(weights):
        if weight.numel():
            place = (rows, columns, length, number * rows)
            triton_fp8.quantise_transposes[grid](
                weight.contiguous(), values, largest, *place, TALL=TALL, WIDE=WIDE, num_warps=8
            )
    return values, each


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.shape[-1] <= LONGEST


def _room_for(shape: tuple[int, ...], device: torch.device) -> Quantised:
    values = torch.empty(shape, dtype=VALUES, device=device)
    return values, torch.empty(shape[:-1], dtype=torch.float32, device=device)


def _quantise_rows(x: Tensor, values: Tensor, scales: Tensor, high: int, spread: int, first: int) -> None:
    from cuboid.kernels import triton_fp8

    if not x.numel():
        return
    width = x.shape[-1]
    block = 1 << (width - 1).bit_length()
    triton_fp8.quantise_long_rows[(x.numel() // width,)](
        x, values, scales, width, high, spread, first, BLOCK=block, num_warps=4 if block <= 4096 else 8
    )
