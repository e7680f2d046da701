"""The split backward: products whose weight gradient waits until the schedule has time for it.

The input gradient is what the previous stage waits for; nobody waits for the weight gradient (zero-bubble
schedules)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.mixture import GroupedProduct, grouped_outer, grouped_product


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


class _DeferrableProduct(torch.autograd.Function):
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


def deferrable_product(deferral: Deferral) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _DeferrableProduct.apply(x, weight, bias, deferral)

    return product


class _DeferrableGroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, counts: Tensor, deferral: Deferral) -> Tensor:
        context.save_for_backward(x, counts)
        context.weight, context.deferral = weight, deferral
        return grouped_product(x, weight, counts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, counts = context.saved_tensors
        weight, deferral = context.weight, context.deferral
        gradient = gradient.contiguous()
        input_gradient = grouped_product(gradient, weight.transpose(1, 2), counts)
        if not deferral.active:
            return input_gradient, grouped_outer(gradient, x, counts), None, None
        deferral.postpone(lambda: accumulate(weight, grouped_outer(gradient, x, counts)))
        return input_gradient, None, None, None


def deferrable_grouped_product(deferral: Deferral) -> GroupedProduct:
    def product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return _DeferrableGroupedProduct.apply(x, weight, counts, deferral)

    return product
