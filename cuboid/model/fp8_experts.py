"""Grouped matmuls of routed experts in fp8 (e4m3): forward and input gradient, with a scale for each row of the inputs
and for each row that is multiplied of each expert's weight. Weight gradients stay in 16 bits: what they sum over are
an expert's tokens, a number that no kernel's blocks divide, and cutting them to size costs what 8 bits save.

Experts are not compiled, so kernels of our own quantise on a GPU. A CPU multiplies the same rounded numbers in
float32."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.fp8_block import VALUES, exponents_of
from cuboid.model.moe import grouped_matmul, takes_one_kernel

TALL, WIDE = 128, 64
"""Rows and columns that a program transposes at a time."""
LONGEST = 16384
"""A row that one program of the kernel holds."""


def quantise_long(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of rows, which are x's last dimension. A weight of (experts, out, in) may be the transpose of
    one."""
    transposed = x.dim() == 3 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
    if not x.is_cuda or x.shape[-1] > LONGEST:
        exponents = exponents_of(x.abs().amax(-1))
        return (x.float() * torch.exp2(-exponents.float()).unsqueeze(-1)).to(VALUES), torch.exp2(exponents.float())
    from cuboid.kernels import triton_fp8

    x = x if transposed else x.contiguous()
    values = torch.empty(x.shape, dtype=VALUES, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() and transposed:
        experts, columns, rows = x.shape
        grid = (-(-columns // WIDE), experts)
        triton_fp8.quantise_long_columns[grid](x, values, scales, rows, columns, TALL=TALL, WIDE=WIDE, num_warps=8)
    elif x.numel():
        width = x.shape[-1]
        block = 1 << (width - 1).bit_length()
        triton_fp8.quantise_long_rows[(x.numel() // width,)](
            x, values, scales, width, BLOCK=block, num_warps=4 if block <= 4096 else 8
        )
    return values, scales


def fp8_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """As `moe.grouped_matmul`."""
    values, scales = quantise_long(x)
    weights, weight_scales = quantise_long(weight)
    if takes_one_kernel(x, weight.shape[1]):
        by_row = functional.ScalingType.RowWise
        offsets = counts.cumsum(0, dtype=torch.int32)
        factors = (values, weights.transpose(1, 2), scales, by_row, weight_scales, by_row)
        # Sums within the multipliers: without them the kernel is slower than in 16 bits, 1.24 for 0.62 ms on an H200.
        more = {"offs": offsets, "output_dtype": x.dtype, "use_fast_accum": True}
        y: Tensor = functional.scaled_grouped_mm(*factors, **more)  # type: ignore[attr-defined,unused-ignore]
        return y
    exact = grouped_matmul(values.float() * scales.unsqueeze(-1), weights.float() * weight_scales.unsqueeze(-1), counts)
    return exact.to(x.dtype)
