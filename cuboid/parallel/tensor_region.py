"""The border of a tensor-parallel region: collectives of activations, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from cuboid.kernels.compiler import operation, uncompiled
from cuboid.kernels.recompute import SAVED
from cuboid.model.fp8 import Fp8Matmul, Scaling, input_gradient_factors, multiply, output_of
from cuboid.model.linear import Linear
from cuboid.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from cuboid.parallel.groups import Group


class _SumGradient(torch.autograd.Function):
    """Whole → whole; each rank's column matmuls give a part of the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous().clone(), context.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        # A copy, because selective recomputation keeps the matmul itself.
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Mean(torch.autograd.Function):
    """Of what each rank has of its own heads, for all of them; each then uses it for its heads."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return all_reduce(x.contiguous() / group.size, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous() / context.group.size, context.group), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, context.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient.contiguous(), context.group), None


class Region:
    """The border between what is whole (or split by token) and what is split by head, column or vocabulary row."""

    def __init__(self, group: Group, sequence_parallel: bool, traced: bool = False) -> None:
        """`traced`: the compiler takes collectives of tokens into the graph of a block; nobody counts or watches them
        there."""
        self.number = next(_NUMBERS)
        REGIONS[self.number] = self
        self.overlaps = False
        """Whether `columns` start sums of gradients before they compute weight gradients."""
        self.overlaps_slices = False
        """The same of `sliced_columns`."""
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.traced = traced and sequence_parallel
        self._ranks: Any = group.handle
        self._fake = group.is_fake

    def enter(self, x: Tensor) -> Tensor:
        # Functional collectives, which Inductor may reorder and fuse around; eager code has the watched ones.
        if self.traced and torch.compiler.is_compiling():
            if self._fake:
                return fake_gather(x, self.group.size)
            return all_gather_tensor_autograd(x, 0, self._ranks)
        return self._enter(x)

    def leave(self, x: Tensor) -> Tensor:
        if self.traced and torch.compiler.is_compiling():
            if self._fake:
                return fake_scatter(x, self.group.size)
            return reduce_scatter_tensor_autograd(x, "sum", 0, self._ranks)
        return self._leave(x)

    def columns(self, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        """What linears of split output columns make of one input."""
        if x.ndim == 2:
            return columns(self, x, linears)
        made = columns(self, x.reshape(-1, x.shape[-1]), linears)
        return [part.unflatten(0, x.shape[:-1]) for part in made]

    def sliced_columns(self, inputs: Sequence[Tensor], linears: Sequence[Linear | None]) -> Sequence[Tensor]:
        """What such linears make of an input each."""
        return sliced_columns(self, inputs, linears)

    @uncompiled
    def mean(self, x: Tensor) -> Tensor:
        mean: Tensor = _Mean.apply(x, self.group)
        return mean

    def gather(self, x: Tensor) -> Tensor:
        """The tokens of all ranks, without a gradient."""
        x = x.detach()
        if not self.sequence_parallel:
            return x
        if not (self.traced and torch.compiler.is_compiling()):
            return self._gather(x)
        return fake_gather(x, self.group.size) if self._fake else all_gather_tensor(x, 0, self._ranks)

    def start_sum(self, gradient: Tensor) -> Pending:
        """Of what the columns of each rank give of the gradient of their input: all of it, or of this rank's tokens."""
        # Tokens are rows: with sequence parallelism a rank needs the sum of its own rows only, 1/tp of the bytes.
        start = start_reduce_scatter if self.sequence_parallel else start_all_reduce
        return start(gradient, self.group)

    # Else the compiler stops.

    @uncompiled
    def _gather(self, x: Tensor) -> Tensor:
        return all_gather(x, self.group)

    @uncompiled
    def _enter(self, x: Tensor) -> Tensor:
        function = _GatherTokens if self.sequence_parallel else _SumGradient
        return function.apply(x, self.group)

    @uncompiled
    def _leave(self, x: Tensor) -> Tensor:
        function = _ScatterTokens if self.sequence_parallel else _Sum
        return function.apply(x, self.group)


_NUMBERS = count()
REGIONS: WeakValueDictionary[int, Region] = WeakValueDictionary()
"""By number, which is all that a compiled graph knows of one."""


# Column-parallel matmuls. Backward, they start the collective of the input gradient, compute the weight gradients
# while it is in flight, and only then wait for it.
#
#     input gradient  matmul │ all-reduce, or reduce-scatter with sequence parallelism │
#     weight gradients       │ matmul │ …                                              │ wait
#
# To the compiler the whole backward pass of such matmuls is one operation: it orders what it sees by memory, and would
# wait for the collective where it starts. The gathered input is kept for the weight gradient, or gathered again with
# whatever else is recomputed. Where the schedule puts weight gradients off, nothing is left here to overlap with.
#
# The linears take one input, or slices of one: the latents of MLA enter together, and so do their gradients.


def columns(region: Region, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """What linears of split output columns make of one input."""
    if (made := _overlapped(region, x, linears, sliced=False) if region.overlaps else None) is not None:
        return made
    whole = region.enter(x)
    return [linear.matmul(whole, linear.weight, linear.bias) for linear in linears]


def sliced_columns(region: Region, inputs: Sequence[Tensor], linears: Sequence[Linear | None]) -> Sequence[Tensor]:
    """What such linears make of an input each. All inputs enter through one collective, and so do their gradients
    backward. None: this input only enters; such inputs are the last ones."""
    used = [linear for linear in linears if linear is not None]
    if len(used) == len(inputs) == 1:
        return columns(region, inputs[0], used)
    # One gather of (tokens, sum of widths) in place of one for each latent; backward one reduce-scatter.
    x, widths = torch.cat([*inputs], -1), [each.shape[1] for each in inputs]
    made = _overlapped(region, x, used, sliced=True) if region.overlaps_slices and used else None
    if made is not None:
        *outputs, rest = made
        return *outputs, *rest.split(widths[len(used) :], -1)
    entered = region.enter(x).split(widths, -1)
    pairs = zip(entered, linears, strict=True)
    return [x if linear is None else linear.matmul(x, linear.weight, linear.bias) for x, linear in pairs]


def _overlapped(region: Region, x: Tensor, linears: Sequence[Linear], sliced: bool) -> tuple[Tensor, ...] | None:
    """None: by other matmuls than these. `sliced`: each linear takes the next columns of `x` in place of all, and the
    columns that no linear takes are returned last."""
    # Only matmuls known here: a postponed one has no weight gradient to overlap with.
    matmuls = [linear.matmul for linear in linears]
    held = (*(linear.weight for linear in linears), *(linear.bias for linear in linears))
    if all(matmul is functional.linear for matmul in matmuls):
        return _Columns.apply(region.number, sliced, x, region.gather(x), *held)
    if isinstance(matmuls[0], Fp8Matmul):
        return _Fp8Columns.apply(region.number, sliced, matmuls[0].scaling, x, region.gather(x), *held)
    return None


def fused_columns(region: Region, x: Tensor, fused: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """One matmul with weights that lie side by side in `fused`."""
    return _FusedColumns.apply(x, region.gather(x), region.number, fused, *weights)


# The operations. Each returns the summed gradient of the input and then those of the weights. `rest`: the gradient of
# the columns that no linear takes; None where each linear takes all of them.


def _backward(
    gradients: list[Tensor], weights: list[Tensor], x: Tensor, rest: Tensor | None, region: int
) -> list[Tensor]:
    total = _total((gradient @ weight for gradient, weight in zip(gradients, weights, strict=True)), rest)
    summed = REGIONS[region].start_sum(total)
    inputs = _inputs(x, weights, rest is not None)
    own = [gradient.t() @ each for gradient, each in zip(gradients, inputs, strict=True)]
    return [summed.wait(), *own]


def _fp8_backward(
    factors: list[Tensor], waiting: list[Tensor], rest: Tensor | None, dtype: torch.dtype, region: int
) -> list[Tensor]:
    """In fp8. Of each linear four factors: of its input gradient, and of its weight gradient."""
    summed = REGIONS[region].start_sum(_total(_multiplied(factors, dtype), rest))
    own = [*_multiplied(waiting, dtype)]
    return [summed.wait(), *own]


def _total(parts: Iterator[Tensor], rest: Tensor | None) -> Tensor:
    """Of what each linear gives of the input gradient."""
    if rest is not None:
        return torch.cat((*parts, rest), 1)
    total = next(parts)
    for part in parts:
        total += part
    return total


def _inputs(x: Tensor, weights: Sequence[Tensor], sliced: bool) -> Sequence[Tensor]:
    """What each linear takes of `x`."""
    if not sliced:
        return [x] * len(weights)
    widths = [weight.shape[1] for weight in weights]
    return x[:, : sum(widths)].split(widths, 1)


def _multiplied(factors: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    quadruples = zip(factors[::4], factors[1::4], factors[2::4], factors[3::4], strict=True)
    return (multiply(a, a_scale, b, b_scale, dtype, fast=False) for a, a_scale, b, b_scale in quadruples)


# `define`, not `custom_op`: every layer calls these twice, and what `custom_op` adds takes the host longer.
torch.library.define(
    "cuboid::columns_backward", "(Tensor[] gradients, Tensor[] weights, Tensor x, Tensor? rest, int region) -> Tensor[]"
)
torch.library.define(
    "cuboid::fp8_columns_backward",
    "(Tensor[] factors, Tensor[] waiting, Tensor? rest, ScalarType dtype, int region) -> Tensor[]",
)
torch.library.impl("cuboid::columns_backward", ("cpu", "cuda"), _backward)
torch.library.impl("cuboid::fp8_columns_backward", ("cpu", "cuda"), _fp8_backward)


def _empty_sum(tokens: int, like: Tensor, width: int, dtype: torch.dtype, region: int) -> Tensor:
    there = REGIONS[region]
    return like.new_empty(tokens // there.group.size if there.sequence_parallel else tokens, width, dtype=dtype)


@torch.library.register_fake("cuboid::columns_backward")  # type: ignore[untyped-decorator]
def _(gradients: list[Tensor], weights: list[Tensor], x: Tensor, rest: Tensor | None, region: int) -> list[Tensor]:
    summed = _empty_sum(x.shape[0], x, x.shape[1], x.dtype, region)
    return [summed, *(weight.new_empty(weight.shape) for weight in weights)]


@torch.library.register_fake("cuboid::fp8_columns_backward")  # type: ignore[untyped-decorator]
def _(
    factors: list[Tensor], waiting: list[Tensor], rest: Tensor | None, dtype: torch.dtype, region: int
) -> list[Tensor]:
    widths = [each.shape[0] for each in factors[2::4]]
    width = widths[0] if rest is None else sum(widths) + rest.shape[1]
    summed = _empty_sum(factors[0].shape[0], factors[0], width, dtype, region)
    shapes = [(waiting[at].shape[0], waiting[at + 2].shape[0]) for at in range(0, len(waiting), 4)]
    return [summed, *(summed.new_empty(shape) for shape in shapes)]


def _run(gradients: list[Tensor], weights: list[Tensor], x: Tensor, rest: Tensor | None, region: int) -> list[Tensor]:
    """Outside of the compiler not as one operation: a tally of memory follows each that it is made of."""
    run = torch.ops.cuboid.columns_backward if torch.compiler.is_compiling() else _backward
    made: list[Tensor] = run(gradients, weights, x, rest, region)
    return made


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, region: int, sliced: bool, *held: Tensor | None) -> tuple[Tensor, ...]:
        """`held`: what this rank has of the tokens, all of them, all weights, all biases. They have one name: without
        gradients the compiler takes a function that is given one thing more than it names to have no context."""
        _, whole, weights, biases = _apart(held)
        context.save_for_backward(whole, *weights)
        context.region, context.sliced, context.has_bias = region, sliced, [bias is not None for bias in biases]
        inputs = _inputs(whole, weights, sliced)
        outputs = (functional.linear(*each) for each in zip(inputs, weights, biases, strict=True))
        return *outputs, *_rest(whole, weights, sliced)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = context.saved_tensors
        made, rest = gradients[: len(weights)], gradients[-1] if context.sliced else None
        summed, *own = _run([*made], weights, whole, rest, context.region)
        return None, None, summed, None, *own, *_bias_gradients(made, context.has_bias)


def _apart(held: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    x, whole, *rest = held
    return x, whole, rest[: len(rest) // 2], rest[len(rest) // 2 :]  # type: ignore[return-value]


def _rest(whole: Tensor, weights: Sequence[Tensor], sliced: bool) -> list[Tensor]:
    """A copy, because nothing that the compiler sees returns a part of what it was given."""
    return [whole[:, sum(weight.shape[1] for weight in weights) :].clone()] if sliced else []


class _FusedColumns(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, whole: Tensor, region: int, *held: Tensor) -> Tensor:
        """`held`: all weights as one, and then each; their gradients are rows of one, too."""
        fused, *weights = held
        context.save_for_backward(whole, fused)
        context.region, context.rows = region, [weight.shape[0] for weight in weights]
        return whole @ fused.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, fused = context.saved_tensors
        summed, own = _run([gradient], [fused], whole, None, context.region)
        return summed, None, None, None, *own.split(context.rows)


class _Fp8Columns(torch.autograd.Function):
    """In fp8, as `fp8.Fp8Matmul`."""

    @staticmethod
    def forward(context: Any, region: int, sliced: bool, scaling: Scaling, *held: Tensor | None) -> tuple[Tensor, ...]:
        """`held`: as `_Columns` has it."""
        _, whole, weights, biases = _apart(held)
        outputs: list[Tensor] = []
        kept: list[Tensor] = []
        for x, weight, bias in zip(_inputs(whole, weights, sliced), weights, biases, strict=True):
            y, *columns = output_of(x, weight, scaling)
            outputs.append(y if bias is None else y + bias)
            kept = [*kept, *columns] if sliced else columns  # the same input, so the same for all
        context.save_for_backward(*weights, *kept)
        context.region, context.sliced, context.scaling = region, sliced, scaling
        context.has_bias = [bias is not None for bias in biases]
        return *outputs, *_rest(whole, weights, sliced)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        linears, saved = len(context.has_bias), context.saved_tensors
        weights, kept = saved[:linears], saved[linears:]
        made, rest = gradients[:linears], gradients[-1] if context.sliced else None
        factors: list[Tensor] = []
        waiting: list[Tensor] = []
        for place, (gradient, weight) in enumerate(zip(made, weights, strict=True)):
            needed, transposed = input_gradient_factors(gradient, weight, context.scaling)
            factors += needed
            waiting += [*transposed, *(kept[2 * place : 2 * place + 2] if context.sliced else kept)]
        traced = torch.compiler.is_compiling()
        run = torch.ops.cuboid.fp8_columns_backward if traced else _fp8_backward
        summed, *own = run(factors, waiting, rest, weights[0].dtype, context.region)
        return None, None, None, summed, None, *own, *_bias_gradients(made, context.has_bias)


def _bias_gradients(gradients: Sequence[Tensor], has_bias: list[bool]) -> list[Tensor | None]:
    return [gradient.sum(0) if has else None for gradient, has in zip(gradients, has_bias, strict=True)]


# Single-rank stand-ins for tensor-parallel collectives (`cuboid probe --rank`): copies of what this rank has, and
# their sum. They are opaque to the compiler, as real collectives are, so that a block saves the same activations.


@operation("cuboid::fake_gather")
def fake_gather(x: Tensor, ranks: int) -> Tensor:
    return x.repeat(ranks, 1)


@torch.library.register_fake("cuboid::fake_gather")  # type: ignore[untyped-decorator]
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] * ranks, x.shape[1])


@operation("cuboid::fake_scatter")
def fake_scatter(x: Tensor, ranks: int) -> Tensor:
    return x.unflatten(0, (ranks, -1)).sum(0)


@torch.library.register_fake("cuboid::fake_scatter")  # type: ignore[untyped-decorator]
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] // ranks, x.shape[1])


# A compiled block then keeps these sums and not the matmuls they come of, tp times as large.
SAVED.update((torch.ops._c10d_functional.reduce_scatter_tensor.default, fake_scatter))


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.ranks = inputs[1]


torch.library.register_autograd(
    "cuboid::fake_gather",
    lambda ctx, gradient: (fake_scatter(gradient, ctx.ranks), None),
    setup_context=_remember,
)
torch.library.register_autograd(
    "cuboid::fake_scatter",
    lambda ctx, gradient: (fake_gather(gradient, ctx.ranks), None),
    setup_context=_remember,
)
