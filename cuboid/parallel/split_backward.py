"""The split backward: matmuls whose weight gradient waits until the schedule has time for it.

The input gradient is what the previous stage waits for; nobody waits for the weight gradient (zero-bubble
schedules)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.fp8 import input_gradient_of, multiply, output_of
from cuboid.model.linear import Matmul
from cuboid.model.moe import GroupedMatmul, grouped_matmul, grouped_outer


class Deferral:
    """Where postponed weight gradients are kept, by the owner that was current when they were postponed."""

    def __init__(self) -> None:
        self.active = False
        self.owner: Hashable = None
        self._postponed: dict[Hashable, list[Callable[[], None]]] = {}

    def postpone(self, work: Callable[[], None]) -> None:
        self._postponed.setdefault(self.owner, []).append(work)

    def take(self) -> dict[Hashable, list[Callable[[], None]]]:
        """Hand over what was postponed since the last call."""
        postponed, self._postponed = self._postponed, {}
        return postponed


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _DeferrableMatmul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
        context.save_for_backward(x)
        context.weight, context.bias, context.deferral = weight, bias, deferral
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = context.saved_tensors
        weight, bias, deferral = context.weight, context.bias, context.deferral
        input_gradient = gradient @ weight if context.needs_input_grad[0] else None
        if not deferral.active:
            bias_gradient = gradient.sum(0) if bias is not None else None
            return input_gradient, gradient.t() @ x, bias_gradient, None

        def weight_gradient() -> None:
            accumulate(weight, gradient.t() @ x)
            if bias is not None:
                accumulate(bias, gradient.sum(0))

        deferral.postpone(weight_gradient)
        return input_gradient, None, None, None


class _DeferrableFp8Matmul(torch.autograd.Function):
    """`fp8.Fp8Matmul`; what waits is kept in fp8."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_row: bool, deferral: Deferral
    ) -> Tensor:
        y, columns, scale = output_of(x, weight, by_row)
        context.save_for_backward(columns, scale)
        context.weight, context.bias, context.by_row, context.deferral = weight, bias, by_row, deferral
        return y if bias is None else y + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale = context.saved_tensors
        weight, bias, deferral = context.weight, context.bias, context.deferral
        input_gradient, transposed, transposed_scale = input_gradient_of(gradient, weight, context.by_row)
        bias_gradient = gradient.sum(0) if bias is not None else None

        def weight_gradient() -> Tensor:
            return multiply(transposed, transposed_scale, columns, scale, weight.dtype, fast=False)

        if not deferral.active:
            return input_gradient, weight_gradient(), bias_gradient, None, None

        def later() -> None:
            accumulate(weight, weight_gradient())
            if bias is not None and bias_gradient is not None:
                accumulate(bias, bias_gradient)

        deferral.postpone(later)
        return input_gradient, None, None, None, None


def deferrable_matmul(deferral: Deferral, fp8_rows: bool | None = None) -> Matmul:
    """`fp8_rows`: in fp8, with a scale for each row or (False) each tensor."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if fp8_rows is None:
            return _DeferrableMatmul.apply(x, weight, bias, deferral)
        return _DeferrableFp8Matmul.apply(x, weight, bias, fp8_rows, deferral)

    return matmul


class _DeferrableGroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, counts: Tensor, deferral: Deferral) -> Tensor:
        context.save_for_backward(x, counts)
        context.weight, context.deferral = weight, deferral
        return grouped_matmul(x, weight, counts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, counts = context.saved_tensors
        weight, deferral = context.weight, context.deferral
        gradient = gradient.contiguous()
        input_gradient = grouped_matmul(gradient, weight.transpose(1, 2), counts)
        if not deferral.active:
            return input_gradient, grouped_outer(gradient, x, counts), None, None
        deferral.postpone(lambda: accumulate(weight, grouped_outer(gradient, x, counts)))
        return input_gradient, None, None, None


def deferrable_grouped_matmul(deferral: Deferral) -> GroupedMatmul:
    def matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return _DeferrableGroupedMatmul.apply(x, weight, counts, deferral)

    return matmul
