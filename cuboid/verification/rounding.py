"""What a layout may differ by in bf16: a multiple of what rounding alone does, measured in the same run.

Every matmul in bf16 rounds by up to 2^-8 of its result, and errors add up with depth and over steps in a way no fixed
number foresees. So one process computes twice, in bf16 and in float32, from the same weights: what its own bf16 differs
by is the spread of equally good answers, tensor by tensor and step by step. A layout, which sums the same matmuls in
another order, has a spread of the same size. NCCL rounds a sum over tensor ranks at every hop; so where a layout has
such sums one process also computes with sums rounded like that (`hops`), and the larger spread counts. A tensor is
allowed `MULTIPLE` times its own spread, or that of the median tensor where that is more, and never less than for one
rounding. Errors are root mean squares over a tensor, relative to the tensor in float32 (of parameters, to the way they
have gone): a factor of two is an error of 1, a sum over two ranks that was skipped about 1/2.

Adam moves a parameter by the learning rate whatever the size of its gradient. One whose gradient is as small as the
rounding moves up or down by chance: of parameters only those are compared whose gradients were larger in every step.
What these differ by is relative to the way they have gone, there and back, and not to where they have come. An update
is a mean of gradients over their root mean square: gradients that are off by a fraction e of themselves change it by up
to 2 e learning rates, also where gradients of both signs cancel and little is left of the update itself. A parameter
that has come back to where it began has that error still, and no distance to hold it against. Its way is no shorter
than its first update, a whole learning rate that only a sign decides: after three steps the error is less than 2 e of
the way. Of a mixture one step is compared: in the next these weights send some tokens to other experts, in any two
orders of summation (measured: gradients of one process in bf16 and float32 then differ by a third to a half). In the
first a token whose experts score alike may already be sent elsewhere; so tensors of a mixture are allowed
`REROUTED`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = dict[str, Tensor]

ROUNDED = ("bf16", "fp16", "fp8")
"""Precisions that are compared so. One process multiplies its loss by a fixed factor in fp16."""
ROUNDOFF = 2.0**-8
"""The largest relative error of one rounding to bf16."""
TENSOR_ROUNDOFF = {"fp8": 2.0**-4}
"""That of a tensor's element, where it is another: to e4m3, in the tensors of fp8."""
MULTIPLE = 4.0
DECIDED = 16.0
"""Parameters count whose gradients are so many times the rounding of their tensor. One of them may still move by 1/16
more or less than another process has it, so that much is always allowed."""
REROUTED = 0.4
"""What one token more or less does to an expert that has a dozen, and not what a sum skipped does."""
NEGLIGIBLE = 1e-6
"""A tensor so many times smaller than the largest of its step is compared on that scale: what is zero but for rounding
has no relative error."""


@dataclass(frozen=True)
class Bound:
    """An error beside what is allowed."""

    error: float
    allowed: float
    name: str = ""

    @property
    def ratio(self) -> float:
        """Of what is allowed; above one it differs."""
        return self.error / self.allowed if self.error == self.error else float("inf")


def allowed(spread: float, least: float = MULTIPLE * ROUNDOFF) -> float:
    return max(MULTIPLE * spread, least)


def number_bound(observed: list[float], rounded: Sequence[list[float]], exact: list[float]) -> Bound:
    """The step that takes up most of what is allowed in it. The first of `rounded` is compared with."""
    bounds = []
    for seen, true, *others in zip(observed, exact, *rounded, strict=True):
        scale = abs(true) or 1.0
        spread = max(abs(other - true) for other in others)
        bounds.append(Bound(abs(seen - others[0]) / scale, allowed(spread / scale)))
    return max(bounds, key=lambda bound: bound.ratio)


def tensor_bound(
    observed: list[Tensors],
    rounded: Sequence[list[Tensors]],
    exact: list[Tensors],
    least: float,
    beside: list[Tensors] | None = None,
) -> Bound:
    """The tensor of any step that takes up most of what it is allowed, which is never less than `least`. The first of
    `rounded` is compared with. Errors are relative to the size of what is `beside` it; default: of `exact`."""
    bounds = [Bound(0.0, least)]
    for seen, true, large, *others in zip(observed, exact, beside or exact, *rounded, strict=True):
        expected = others[0]
        if odd := _different(seen, expected):
            return Bound(float("inf"), least, odd)
        scales = {name: _size(tensor) for name, tensor in large.items()}
        floor = NEGLIGIBLE * max(scales.values()) or 1.0
        scales = {name: max(scale, floor) for name, scale in scales.items()}
        spreads = {name: max(_distance(other[name], true[name]) for other in others) / scales[name] for name in true}
        typical = median(spreads.values())
        for name, scale in scales.items():
            error = _distance(seen[name], expected[name]) / scale
            bounds.append(Bound(error, allowed(max(spreads[name], typical), least), name))
    return max(bounds, key=lambda bound: bound.ratio)


def moved(parameters: list[Tensors], start: Tensors, among_steps: list[Tensors]) -> list[Tensors]:
    """How far each parameter that counts has come, after every step."""
    return [
        {name: (tensor - start[name].to(tensor))[among[name]] for name, tensor in step.items()}
        for step, among in zip(parameters, among_steps, strict=True)
    ]


def walked(parameters: list[Tensors], start: Tensors, among_steps: list[Tensors]) -> list[Tensors]:
    """The way of each parameter that counts, there and back, after every step."""
    found: list[Tensors] = []
    before, ways = start, {name: tensor.new_zeros(tensor.shape) for name, tensor in start.items()}
    for step, among in zip(parameters, among_steps, strict=True):
        ways = {name: ways[name] + (tensor - before[name]).abs() for name, tensor in step.items()}
        found.append({name: way[among[name]] for name, way in ways.items()})
        before = step
    return found


def decided(rounded: Sequence[list[Tensors]], exact: list[Tensors]) -> list[Tensors]:
    """For every step and tensor of gradients: which elements rounding did not give their sign, in it and before."""
    found: list[Tensors] = []
    for true, *others in zip(exact, *rounded, strict=True):
        now = {}
        for name, tensor in true.items():
            # Rows that no token looked up have no gradient and no rounding: they would hide that of the others.
            has = (tensor != 0) | (others[0][name] != 0)
            spread = max(_distance(other[name][has], tensor[has]) for other in others)
            now[name] = tensor.abs() > DECIDED * spread
            if found:
                now[name] &= found[-1][name]
        found.append(now)
    return found


def _different(seen: Tensors, expected: Tensors) -> str:
    for name in sorted(seen.keys() | expected.keys()):
        if name not in seen or name not in expected:
            return f"{name} is held by one side only"
        if seen[name].shape != expected[name].shape:
            return f"{name} has another shape"
    return ""


def _distance(one: Tensor, other: Tensor) -> float:
    return _size(one.double() - other.double())


def _size(x: Tensor) -> float:
    """The root mean square; zero of nothing."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0
