"""The border of a tensor-parallel region: collectives of activations, forward and backward."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from cuboid.kernels.compiler import uncompiled
from cuboid.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from cuboid.parallel.fake_collectives import imagined_gather, imagined_scatter
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
        self._imagined = group.is_fake

    def enter(self, x: Tensor) -> Tensor:
        if self.traced and torch.compiler.is_compiling():
            if self._imagined:
                return imagined_gather(x, self.group.size)
            return all_gather_tensor_autograd(x, 0, self._ranks)
        return self._enter(x)

    def leave(self, x: Tensor) -> Tensor:
        if self.traced and torch.compiler.is_compiling():
            if self._imagined:
                return imagined_scatter(x, self.group.size)
            return reduce_scatter_tensor_autograd(x, "sum", 0, self._ranks)
        return self._leave(x)

    def gather(self, x: Tensor) -> Tensor:
        """The tokens of all ranks, without a gradient."""
        x = x.detach()
        if not self.sequence_parallel:
            return x
        if not (self.traced and torch.compiler.is_compiling()):
            return self._gather(x)
        return imagined_gather(x, self.group.size) if self._imagined else all_gather_tensor(x, 0, self._ranks)

    def start_sum(self, gradient: Tensor) -> Pending:
        """Of what the columns of each rank give of the gradient of their input: all of it, or of this rank's tokens."""
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
