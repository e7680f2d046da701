"""The split backward inside compiled blocks.

A compiled backward pass is one graph, which cannot ask whether weight gradients are to wait. So the input-gradient
matmul is a custom operation, opaque to the compiler. It either keeps what the weight gradient needs for later or
computes that gradient at once. Weights get their gradients from it, not from autograd.

Eager blocks use `split_backward`, whose operations stay visible to dispatch modes (the memory tally, float32 matmuls
for 16-bit numbers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.compiler import operation
from cuboid.model.fp8 import input_gradient_factors, multiply, output_of
from cuboid.model.linear import Linear, Matmul
from cuboid.parallel.split_backward import Deferral, accumulate

UNTOUCHED: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""For the compiler: memory that is left for later must not be written to once the graph itself is done with it."""

_NUMBERS = count()
_POSTPONERS: WeakValueDictionary[int, Postponer] = WeakValueDictionary()


class Postponer:
    """Where the weight gradient of a matmul goes."""

    def __init__(self, weights: Sequence[Tensor], deferral: Deferral) -> None:
        """`weights`: one, or several that were multiplied as one, row after row."""
        self._weights, self._deferral = weights, deferral
        number = next(_NUMBERS)
        _POSTPONERS[number] = self
        # A tensor, because a number would be part of the graph, and each layer would have its own.
        self.number = torch.tensor(number, device="cpu")

    def take(self, gradient: Callable[[], Tensor]) -> None:
        def work() -> None:
            rows = [weight.shape[0] for weight in self._weights]
            for weight, part in zip(self._weights, gradient().split(rows), strict=True):
                accumulate(weight, part)

        if self._deferral.active:
            self._deferral.postpone(work)
        else:
            work()


@operation("cuboid::input_gradient")
def input_gradient(gradient: Tensor, weight: Tensor, x: Tensor, number: Tensor) -> Tensor:
    """`x`: what the weight was multiplied with. `number`: of the postponer."""
    _POSTPONERS[int(number)].take(lambda: gradient.t() @ x)
    return gradient @ weight


@torch.library.register_fake("cuboid::input_gradient")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, weight: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operation("cuboid::narrow_input_gradient")
def narrow_input_gradient(factors: list[Tensor], waiting: list[Tensor], dtype: torch.dtype, number: Tensor) -> Tensor:
    """In 8 bits. `factors`, `waiting`: of the input gradient and of the weight gradient, two tensors each of which its
    scale follows."""
    _POSTPONERS[int(number)].take(lambda: _matmul(waiting, dtype))
    return _matmul(factors, dtype)


@torch.library.register_fake("cuboid::narrow_input_gradient")  # type: ignore[untyped-decorator]
def _(factors: list[Tensor], waiting: list[Tensor], dtype: torch.dtype, number: Tensor) -> Tensor:
    return factors[0].new_empty(factors[0].shape[0], factors[2].shape[0], dtype=dtype)


def _matmul(factors: list[Tensor], dtype: torch.dtype) -> Tensor:
    a, a_scale, b, b_scale = factors
    return multiply(a, a_scale, b, b_scale, dtype, fast=False)


class _SplitMatmul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        context.save_for_backward(x, weight, number)
        context.has_bias = bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, number = context.saved_tensors
        bias_gradient = gradient.sum(0) if context.has_bias else None
        return input_gradient(gradient, weight, x, number), None, bias_gradient, None


class _SplitFp8Matmul(torch.autograd.Function):
    """`fp8.Fp8Matmul`; what waits is kept in fp8."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_row: bool, number: Tensor) -> Tensor:
        y, columns, scale = output_of(x, weight, by_row)
        context.save_for_backward(columns, scale, weight, number)
        context.by_row, context.has_bias = by_row, bias is not None
        return y if bias is None else y + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight, number = context.saved_tensors
        factors, transposed = input_gradient_factors(gradient, weight, context.by_row)
        result = narrow_input_gradient([*factors], [*transposed, columns, scale], weight.dtype, number)
        return result, None, gradient.sum(0) if context.has_bias else None, None, None


def split_fused_matmul(weights: Sequence[Tensor], fused: Tensor, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    """With all of the weights, which are the rows of `fused`."""
    postponer = Postponer(weights, deferral)
    return lambda x: _SplitMatmul.apply(x, fused, None, postponer.number)


def split_matmul(linear: Linear, deferral: Deferral, fp8_rows: bool | None) -> Matmul:
    """For this linear. `fp8_rows`: in fp8, with a scale for each row or (False) each tensor."""
    postponer = Postponer([linear.weight], deferral)

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if fp8_rows is None:
            return _SplitMatmul.apply(x, weight, bias, postponer.number)
        return _SplitFp8Matmul.apply(x, weight, bias, fp8_rows, postponer.number)

    return matmul
