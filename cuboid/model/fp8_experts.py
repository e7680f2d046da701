"""Grouped matmuls of routed experts in fp8 (e4m3): forward and input gradient, with a scale for each row of the inputs
and for each row that is multiplied of each expert's weight. Weight gradients stay in 16 bits: what they sum over are
an expert's tokens, a number that no kernel's blocks divide, and cutting them to size costs what 8 bits save.

Gate and up are one matmul: their weights are written anew in any case, so they are written side by side, and their
input and the gradient of their results are rounded once.

Experts are not compiled, so kernels of our own quantise on a GPU. A CPU multiplies the same rounded numbers in
float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.fp8_block import VALUES, exponents_of
from cuboid.model.moe import Experts, grouped_matmul, grouped_outer, lie_side_by_side, takes_one_kernel
from cuboid.model.split_backward import Deferral, accumulate, deferrable_grouped_matmul

TALL, WIDE = 128, 64
"""Rows and columns that a program transposes at a time."""
LONGEST = 16384
"""A row that one program of the kernel holds."""

Quantised = tuple[Tensor, Tensor]
"""Values, and scales of rows, which are the last dimension."""


def multiply_experts_in_fp8(experts: Experts, deferral: Deferral) -> None:
    def gate_and_up(x: Tensor, gate: Tensor, up: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = _GateAndUp.apply(x, gate, up, counts, deferral)
        return both

    experts.matmul = deferrable_grouped_matmul(deferral, fp8_grouped_matmul)
    experts.gate_and_up = gate_and_up


def fp8_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """As `moe.grouped_matmul`."""
    return _multiply(x, quantise_long(weight), counts)


class _GateAndUp(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, gate: Tensor, up: Tensor, counts: Tensor, deferral: Deferral
    ) -> tuple[Tensor, ...]:
        context.save_for_backward(x, counts)
        context.weights, context.deferral = (gate, up), deferral
        return _multiply(x, quantise_pair(gate, up), counts).chunk(2, dim=1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, counts = context.saved_tensors
        weights, deferral = context.weights, context.deferral
        left, right = gradients
        if lie_side_by_side(left, right):
            both = left.as_strided((left.shape[0], 2 * left.shape[1]), (left.stride(0), 1))
        else:
            both = torch.cat(gradients, dim=1)
        input_gradient = _multiply(both, quantise_pair(*(weight.transpose(1, 2) for weight in weights)), counts)
        halves = both.chunk(2, dim=1)
        if not deferral.active:
            return input_gradient, *(grouped_outer(half, x, counts) for half in halves), None, None

        def later() -> None:
            for weight, half in zip(weights, halves, strict=True):
                accumulate(weight, grouped_outer(half, x, counts))

        deferral.postpone(later)
        return input_gradient, None, None, None, None


def _multiply(x: Tensor, weight: Quantised, counts: Tensor) -> Tensor:
    values, scales = quantise_long(x)
    weights, weight_scales = weight
    if takes_one_kernel(x, weights.shape[1]):
        by_row = functional.ScalingType.RowWise
        offsets = counts.cumsum(0, dtype=torch.int32)
        factors = (values, weights.transpose(1, 2), scales, by_row, weight_scales, by_row)
        # Sums within the multipliers: without them the kernel is slower than in 16 bits, 1.24 for 0.62 ms on an H200.
        more = {"offs": offsets, "output_dtype": x.dtype, "use_fast_accum": True}
        y: Tensor = functional.scaled_grouped_mm(*factors, **more)  # type: ignore[attr-defined,unused-ignore]
        return y
    exact = grouped_matmul(values.float() * scales.unsqueeze(-1), weights.float() * weight_scales.unsqueeze(-1), counts)
    return exact.to(x.dtype)


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
