"""Matmuls of linears in fp8: inputs and weights are rounded to e4m3, gradients of outputs to e5m2 or e4m3.

Each of the three matmuls of a linear (output, input gradient, weight gradient) takes two tensors of 8 bits and their
scales, sums in float32 and gives a tensor of the input's own precision. The scales come from the tensors themselves:
one for a whole tensor ("tensor"), whose gradients are then in e5m2, one for each row that is multiplied ("row"), or
those of blocks ("block", `fp8_block`), both with e4m3 throughout. The first two are written in plain operations, so
that the compiler fuses amax, scale and rounding with what stands before them. A CPU multiplies the same rounded
numbers in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.kernels.compiler import operation
from cuboid.model.fp8_block import block_matmul, is_of_blocks, quantise_both, quantise_weight

INPUT = torch.float8_e4m3fn
Scaling = Literal["tensor", "row", "block"]
_SMALLEST = 1e-30  # a tensor of zeros has a scale too


def require_fp8(device: torch.device, scaling: Scaling, experts: bool = False) -> None:
    if device.type != "cuda":
        return
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if capability < (8, 9):
        raise UserError(f"training.precision=fp8 is not in {name}, whose matmuls begin at 16 bits; use precision=bf16")
    if scaling == "block" and capability[0] != 9:
        raise UserError(
            f"training.fp8_scaling=block needs matmuls with scales of blocks, which Hopper has and {name} lacks; use "
            "fp8_scaling=row"
        )
    if experts and capability[0] != 9:
        raise UserError(
            f"training.fp8_experts=true needs grouped matmuls in fp8, which torch has for Hopper and not for {name}; "
            "use fp8_experts=false"
        )


def quantise(x: Tensor, dtype: torch.dtype, by_row: bool, dimension: int = 1) -> tuple[Tensor, Tensor]:
    """`x` in fp8 and the scale that gives it back, by_row: one for each index that is not in `dimension`."""
    # Rows first: the compiler finds the peak of a row in the kernel that makes the row.
    peak = x.abs().amax(dimension, keepdim=True) if by_row else x.abs().amax(1).amax()
    exponent = exponent_of(peak, dtype)
    return (x.float() * torch.exp2(-exponent)).to(dtype).contiguous(), torch.exp2(exponent)


def exponent_of(peak: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponent of the smallest power-of-two scale that fits amax (`peak`) into `dtype`. Quantising again what ZeRO 3
    gathered in fp8 is then exact."""
    return torch.log2(peak.float().clamp(min=_SMALLEST) / torch.finfo(dtype).max).ceil()


def quantise_columns(x: Tensor, dtype: torch.dtype, by_row: bool, apart: bool = False) -> tuple[Tensor, Tensor]:
    """The transpose of `x` in fp8, row after row, with its scale. `apart`: written by a kernel of its own, because
    the one before it goes through `x` row by row and would write every column in single bytes."""
    values, scale = quantise(x, dtype, by_row, 0)  # with one scale the same as `quantise` did, which the compiler sees
    transposed = transpose(values) if apart else values.t().contiguous()
    return transposed, scale.reshape(-1, 1) if by_row else scale


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b.T, both row after row. `fast`: fast accumulation, which keeps fewer bits of sums; not of
    blocks."""
    if is_of_blocks(a_scale):
        return block_matmul(a, a_scale, b, b_scale, dtype)
    columns = b_scale.reshape(1, -1) if b_scale.dim() else b_scale  # not t(): the kernel wants strides of one
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=columns, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float().t()) * (a_scale * columns)).to(dtype)


def output_of(x: Tensor, weight: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """The matmul, and what the weight gradient needs of the input."""
    if scaling == "block":
        values, scales, *columns = quantise_both(x)
        return block_matmul(values, scales, *quantise_weight(weight, False), x.dtype), *columns
    by_row = scaling == "row"
    quantised, quantised_weight = quantise(x, INPUT, by_row), quantise(weight, INPUT, by_row)
    y = multiply(*quantised, *quantised_weight, x.dtype, fast=True)
    return y, *quantise_columns(x, INPUT, by_row, apart=True)


Factors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a matmul: both in fp8, each before its scale."""


def input_gradient_factors(gradient: Tensor, weight: Tensor, scaling: Scaling) -> tuple[Factors, tuple[Tensor, Tensor]]:
    """Of the matmul that is the gradient of the input, and what the weight gradient needs of that of the output. One
    scale for all of a gradient needs the range of e5m2; one for each row does not."""
    if scaling == "block":
        values, scales, *columns = quantise_both(gradient)
        return (values, scales, *quantise_weight(weight, True)), (columns[0], columns[1])
    by_row = scaling == "row"
    dtype = INPUT if by_row else torch.float8_e5m2
    factors = (*quantise(gradient, dtype, by_row), *quantise_columns(weight, INPUT, by_row))
    return factors, quantise_columns(gradient, dtype, by_row, apart=by_row)


def input_gradient_of(gradient: Tensor, weight: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input, and what the weight gradient needs of that of the output."""
    factors, transposed = input_gradient_factors(gradient, weight, scaling)
    return multiply(*factors, weight.dtype, fast=False), *transposed


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
        y, columns, scale = output_of(x, weight, scaling)
        context.save_for_backward(columns, scale, weight)
        context.scaling, context.has_bias = scaling, bias is not None
        return y if bias is None else y + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight = context.saved_tensors
        input_gradient, transposed, transposed_scale = input_gradient_of(gradient, weight, context.scaling)
        weight_gradient = multiply(transposed, transposed_scale, columns, scale, weight.dtype, fast=False)
        bias_gradient = gradient.sum(0) if context.has_bias else None
        return input_gradient, weight_gradient, bias_gradient, None


@dataclass(frozen=True)
class Fp8Matmul:
    """A `linear.Matmul`; who replaces it can see what it replaces."""

    scaling: Scaling

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _Matmul.apply(x, weight, bias, self.scaling)
        return y


# The transpose of an fp8 matrix as one custom operation: Inductor neither fuses it with others nor repeats it in the
# backward pass.


TILE = 64


@operation("cuboid::transpose")
def transpose(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.t().contiguous()
    from cuboid.kernels.triton_kernels import transpose_tiles

    rows, columns = x.shape
    result = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    grid = (-(-rows // TILE), -(-columns // TILE))
    transpose_tiles[grid](x.view(torch.int8), result.view(torch.int8), rows, columns, TILE=TILE)
    return result


@torch.library.register_fake("cuboid::transpose")  # type: ignore[untyped-decorator]
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])
