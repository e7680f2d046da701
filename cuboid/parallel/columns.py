"""Column-parallel matmuls. Backward, they start the collective of the input gradient, compute the weight gradients
while it is under way, and only then wait for it.

    input gradient  matmul │ all-reduce, or reduce-scatter with sequence parallelism │
    weight gradients       │ matmul │ …                                              │ wait

To the compiler the whole backward pass of such matmuls is one operation: it orders what it sees by memory, and would
wait for the collective where it starts. The gathered input is kept for the weight gradient, or gathered again with
whatever else is recomputed. Where the schedule puts weight gradients off, nothing is left here to overlap with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.fp8 import Fp8Product, input_gradient_factors, multiply, output_of
from cuboid.model.linear import Linear
from cuboid.parallel.tensor_region import REGIONS, Region


def columns(region: Region, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """What linears of split output columns make of one input."""
    products = [linear.product for linear in linears]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if region.overlaps and all(product is functional.linear for product in products):
        return _Columns.apply(x, region.gather(x), region.number, *weights, *biases)
    if region.overlaps and isinstance(products[0], Fp8Product):
        return _NarrowColumns.apply(x, region.gather(x), region.number, products[0].by_row, *weights, *biases)
    whole = region.enter(x)
    return [linear.product(whole, linear.weight, linear.bias) for linear in linears]


def joined_columns(region: Region, x: Tensor, joined: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """One matmul with weights that lie side by side in `joined`."""
    return _JoinedColumns.apply(x, region.gather(x), region.number, joined, *weights)


# The operations. Each returns the summed gradient of the input and then those of the weights.


def _backward(gradients: list[Tensor], weights: list[Tensor], x: Tensor, region: int) -> list[Tensor]:
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total += gradient @ weight
    summed = REGIONS[region].start_sum(total)
    own = [gradient.t() @ x for gradient in gradients]
    return [summed.wait(), *own]


def _narrow_backward(factors: list[Tensor], waiting: list[Tensor], dtype: torch.dtype, region: int) -> list[Tensor]:
    """In 8 bits. Of each linear four factors: of its input gradient, and of its weight gradient."""
    total, *others = _multiplied(factors, dtype)
    for other in others:
        total += other
    summed = REGIONS[region].start_sum(total)
    own = _multiplied(waiting, dtype)
    return [summed.wait(), *own]


def _multiplied(factors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    quadruples = zip(factors[::4], factors[1::4], factors[2::4], factors[3::4], strict=True)
    return [multiply(a, a_scale, b, b_scale, dtype, fast=False) for a, a_scale, b, b_scale in quadruples]


# `define`, not `custom_op`: every layer calls these twice, and what `custom_op` adds takes the host longer.
torch.library.define(
    "cuboid::columns_backward", "(Tensor[] gradients, Tensor[] weights, Tensor x, int region) -> Tensor[]"
)
torch.library.define(
    "cuboid::narrow_columns_backward", "(Tensor[] factors, Tensor[] waiting, ScalarType dtype, int region) -> Tensor[]"
)
torch.library.impl("cuboid::columns_backward", ("cpu", "cuda"), _backward)
torch.library.impl("cuboid::narrow_columns_backward", ("cpu", "cuda"), _narrow_backward)


def _empty_sum(tokens: int, like: Tensor, width: int, dtype: torch.dtype, region: int) -> Tensor:
    there = REGIONS[region]
    return like.new_empty(tokens // there.group.size if there.sequence_parallel else tokens, width, dtype=dtype)


@torch.library.register_fake("cuboid::columns_backward")  # type: ignore[untyped-decorator]
def _(gradients: list[Tensor], weights: list[Tensor], x: Tensor, region: int) -> list[Tensor]:
    summed = _empty_sum(x.shape[0], x, x.shape[1], x.dtype, region)
    return [summed, *(weight.new_empty(weight.shape) for weight in weights)]


@torch.library.register_fake("cuboid::narrow_columns_backward")  # type: ignore[untyped-decorator]
def _(factors: list[Tensor], waiting: list[Tensor], dtype: torch.dtype, region: int) -> list[Tensor]:
    summed = _empty_sum(factors[0].shape[0], factors[0], factors[2].shape[0], dtype, region)
    shapes = [(waiting[at].shape[0], waiting[at + 2].shape[0]) for at in range(0, len(waiting), 4)]
    return [summed, *(summed.new_empty(shape) for shape in shapes)]


def _run(gradients: list[Tensor], weights: list[Tensor], x: Tensor, region: int) -> list[Tensor]:
    """Outside of the compiler not as one operation: a tally of memory follows each that it is made of."""
    traced = torch.compiler.is_compiling()
    made: list[Tensor] = (torch.ops.cuboid.columns_backward if traced else _backward)(gradients, weights, x, region)
    return made


class _Columns(torch.autograd.Function):
    """`x` is what this rank holds of the tokens, `whole` all of them."""

    @staticmethod
    def forward(context: Any, x: Tensor, whole: Tensor, region: int, *held: Tensor | None) -> tuple[Tensor, ...]:
        """`held`: all weights, then all biases."""
        weights, biases = held[: len(held) // 2], held[len(held) // 2 :]
        context.save_for_backward(whole, *weights)
        context.region, context.has_bias = region, [bias is not None for bias in biases]
        return tuple(functional.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = context.saved_tensors
        summed, *own = _run([*gradients], weights, whole, context.region)
        return summed, None, None, *own, *_bias_gradients(gradients, context.has_bias)


class _JoinedColumns(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, whole: Tensor, region: int, *held: Tensor) -> Tensor:
        """`held`: all weights as one, and then each; their gradients are rows of one, too."""
        joined, *weights = held
        context.save_for_backward(whole, joined)
        context.region, context.rows = region, [weight.shape[0] for weight in weights]
        return whole @ joined.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, joined = context.saved_tensors
        summed, own = _run([gradient], [joined], whole, context.region)
        return summed, None, None, None, *own.split(context.rows)


class _NarrowColumns(torch.autograd.Function):
    """In 8 bits, as `fp8.Fp8Product`."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, whole: Tensor, region: int, by_row: bool, *held: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = held[: len(held) // 2], held[len(held) // 2 :]
        outputs, kept = [], []
        for weight, bias in zip(weights, biases, strict=True):
            assert weight is not None
            y, *columns = output_of(whole, weight, by_row)
            outputs.append(y if bias is None else y + bias)
            kept = columns  # the same input, so the same for all
        context.save_for_backward(*kept, *weights)
        context.region, context.by_row, context.has_bias = region, by_row, [bias is not None for bias in biases]
        return tuple(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale, *weights = context.saved_tensors
        factors: list[Tensor] = []
        waiting: list[Tensor] = []
        for gradient, weight in zip(gradients, weights, strict=True):
            needed, turned = input_gradient_factors(gradient, weight, context.by_row)
            factors += needed
            waiting += [*turned, kept, scale]
        traced = torch.compiler.is_compiling()
        run = torch.ops.cuboid.narrow_columns_backward if traced else _narrow_backward
        summed, *own = run(factors, waiting, weights[0].dtype, context.region)
        return summed, None, None, None, *own, *_bias_gradients(gradients, context.has_bias)


def _bias_gradients(gradients: Sequence[Tensor], has_bias: list[bool]) -> list[Tensor | None]:
    return [gradient.sum(0) if has else None for gradient, has in zip(gradients, has_bias, strict=True)]
