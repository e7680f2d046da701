"""The split backward: matmuls whose weight gradient waits until the schedule has time for it.

The input gradient is what the previous stage waits for; nobody waits for the weight gradient (zero-bubble
schedules)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.compiler import operation
from cuboid.model.fp8 import Scaling, input_gradient_factors, input_gradient_of, multiply, output_of
from cuboid.model.linear import Linear, Matmul
from cuboid.model.moe import Experts, GroupedMatmul, RoutedExperts, grouped_matmul, grouped_outer


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
        # x (tokens, in), gradient (tokens, out): input gradient = gradient · W, weight gradient = gradientᵀ · x.
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
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling, deferral: Deferral
    ) -> Tensor:
        y, columns, scale = output_of(x, weight, scaling)
        context.save_for_backward(columns, scale)
        context.weight, context.bias, context.scaling, context.deferral = weight, bias, scaling, deferral
        return y if bias is None else y + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale = context.saved_tensors
        weight, bias, deferral = context.weight, context.bias, context.deferral
        input_gradient, transposed, transposed_scale = input_gradient_of(gradient, weight, context.scaling)
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


def deferrable_matmul(deferral: Deferral, fp8: Scaling | None = None) -> Matmul:
    """`fp8`: in it, with such scales."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.ndim > 2:
            return matmul(x.reshape(-1, x.shape[-1]), weight, bias).unflatten(0, x.shape[:-1])
        if fp8 is None:
            return _DeferrableMatmul.apply(x, weight, bias, deferral)
        return _DeferrableFp8Matmul.apply(x, weight, bias, fp8, deferral)

    return matmul


def defer_matmuls(module: nn.Module, deferral: Deferral) -> None:
    """Weight gradients of linears wait until the schedule has time for them. Those of other layers are computed with
    the input gradient: right as well, only earlier."""
    matmul, grouped = deferrable_matmul(deferral), deferrable_grouped_matmul(deferral)
    for child in module.modules():
        if isinstance(child, Experts | RoutedExperts):
            child.matmul = grouped
        if isinstance(child, Linear):
            child.matmul = matmul
        # Exactly nn.Linear: a subclass may compute something else with its weight.
        elif type(child) is nn.Linear:
            child.forward = partial(_linear, child, matmul)  # type: ignore[method-assign]


def _linear(linear: nn.Linear, matmul: Matmul, x: Tensor) -> Tensor:
    return matmul(x, linear.weight, linear.bias)


class _DeferrableGroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, counts: Tensor, deferral: Deferral, kernels: GroupedKernels
    ) -> Tensor:
        context.save_for_backward(x, counts)
        context.weight, context.deferral, context.kernels = weight, deferral, kernels
        return kernels[0](x, weight, counts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, counts = context.saved_tensors
        weight, deferral = context.weight, context.deferral
        multiply, outer = context.kernels
        gradient = gradient.contiguous()
        input_gradient = multiply(gradient, weight.transpose(1, 2), counts)
        if not deferral.active:
            return input_gradient, outer(gradient, x, counts), None, None, None
        deferral.postpone(lambda: accumulate(weight, outer(gradient, x, counts)))
        return input_gradient, None, None, None, None


GroupedKernels = tuple[GroupedMatmul, GroupedMatmul]


def deferrable_grouped_matmul(
    deferral: Deferral, multiply: GroupedMatmul = grouped_matmul, outer: GroupedMatmul = grouped_outer
) -> GroupedMatmul:
    def matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return _DeferrableGroupedMatmul.apply(x, weight, counts, deferral, (multiply, outer))

    return matmul


# The split backward inside compiled blocks.
#
# A compiled backward pass is one graph, which cannot ask whether weight gradients are to wait. So the input-gradient
# matmul is a custom operation, opaque to the compiler. It either keeps what the weight gradient needs for later or
# computes that gradient at once. Weights get their gradients from it, not from autograd.
#
# Eager blocks use `deferrable_matmul` above, whose operations stay visible to dispatch modes (the memory tally,
# float32 matmuls for 16-bit numbers).


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


@operation("cuboid::fp8_input_gradient")
def fp8_input_gradient(factors: list[Tensor], waiting: list[Tensor], dtype: torch.dtype, number: Tensor) -> Tensor:
    """In fp8. `factors`, `waiting`: of the input gradient and of the weight gradient, two tensors each of which its
    scale follows."""
    _POSTPONERS[int(number)].take(lambda: _matmul(waiting, dtype))
    return _matmul(factors, dtype)


@torch.library.register_fake("cuboid::fp8_input_gradient")  # type: ignore[untyped-decorator]
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
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling, number: Tensor
    ) -> Tensor:
        y, columns, scale = output_of(x, weight, scaling)
        context.save_for_backward(columns, scale, weight, number)
        context.scaling, context.has_bias = scaling, bias is not None
        return y if bias is None else y + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight, number = context.saved_tensors
        factors, transposed = input_gradient_factors(gradient, weight, context.scaling)
        result = fp8_input_gradient([*factors], [*transposed, columns, scale], weight.dtype, number)
        return result, None, gradient.sum(0) if context.has_bias else None, None, None


def split_fused_matmul(
    weights: Sequence[Tensor], fused: Tensor, deferral: Deferral, fp8: Scaling | None = None
) -> Callable[[Tensor], Tensor]:
    """With all of the weights, which are the rows of `fused`."""
    postponer = Postponer(weights, deferral)
    if fp8 is not None:
        return lambda x: _SplitFp8Matmul.apply(x, fused, None, fp8, postponer.number)
    return lambda x: _SplitMatmul.apply(x, fused, None, postponer.number)


def split_matmul(linear: Linear, deferral: Deferral, fp8: Scaling | None) -> Matmul:
    """For this linear. `fp8`: in it, with such scales."""
    postponer = Postponer([linear.weight], deferral)

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if fp8 is None:
            return _SplitMatmul.apply(x, weight, bias, postponer.number)
        return _SplitFp8Matmul.apply(x, weight, bias, fp8, postponer.number)

    return matmul
