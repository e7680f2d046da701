"""Routed experts on tensors without contents, for `segment_costs`: rows go as `parallel.expert` and `parallel.tensor`
send them, but nobody is there to receive them, so every expert is given as many."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.recompute import remembered
from cuboid.model.load_balancing import Balance, Tokens
from cuboid.model.moe import Experts, RoutedExperts, grouped_matmul
from cuboid.model.router import Reorder, Router, order_arrivals
from cuboid.model.split_backward import Deferral, deferrable_grouped_matmul
from cuboid.spec.plugin import SegmentRun
from cuboid.telemetry.communication_ledger import Kind

Made = tuple[str, Kind, int]
"""A collective: its dimension, its kind and its bytes."""


def route_evenly(module: nn.Module, run: SegmentRun, made: list[Made], deferral: Deferral) -> None:
    """Let the experts and routers of a module run without contents. `made`: where collectives are entered."""
    for child in module.modules():
        if isinstance(child, RoutedExperts):
            child.depart = partial(_EvenDispatch, run.expert, made)
            if run.tensor > 1:
                child.part = (0, run.tensor)
                child.take_part = partial(_apply, _LocalPart, run.tensor, made)
                child.put_together = partial(_apply, _GatherParts, run.tensor, made)
        if isinstance(child, Experts | RoutedExperts) and run.on_gpu and run.precision == "bf16":
            one = (_in_one_kernel, _outer_in_one_kernel)
            child.matmul = deferrable_grouped_matmul(deferral, *one) if run.splits_backward else _in_one_kernel
        if isinstance(child, Experts) and run.on_gpu and run.precision == "bf16":
            child.swiglu = _FusedSwiglu.apply
        if isinstance(child, Router):
            child.balance = _balance(run, child, made)
            if run.tensor > 1:
                child.whole_sequences = partial(_whole_sequences, run.tensor, made)


def grouped_flops(left: Tensor, right: Tensor, *_: object, **__: object) -> int:
    """Of `aten._grouped_mm`: each expert's rows with its weight, or two groups of rows, one transposed."""
    return 2 * left.numel() * right.shape[-1]


class _EvenDispatch:
    """In place of `AllToAllDispatch` and of `LocalDispatch`."""

    def __init__(self, ranks: int, made: list[Made], counts: Tensor) -> None:
        self._ranks, self._made, self._leaving = ranks, made, counts

    def leave(self, rows: Tensor) -> None:
        self._rows, self._counts = rows, self._leaving
        if self._ranks > 1:
            arriving = remembered(self._arriving)
            self._counts = arriving.sum(0)
            self._rows = _Trip.apply(rows, self._made)
            self._order, self._inverse = order_arrivals(arriving, len(rows))
        experts = len(self._counts)
        sizes = [(len(rows) + place) // experts for place in range(experts)]
        # What has no contents cannot say how many rows each expert gets.
        setattr(self._counts, "tolist", lambda: sizes)  # noqa: B010

    def _arriving(self) -> Tensor:
        self._made.append(("ep", "all-to-all", self._leaving.nbytes))
        return torch.empty_like(self._leaving).view(self._ranks, -1)

    def arrive(self) -> tuple[Tensor, Tensor]:
        if self._ranks > 1:
            return Reorder.apply(self._rows, self._order, self._inverse), self._counts
        return self._rows, self._counts

    def go_back(self, rows: Tensor) -> Tensor:
        if self._ranks > 1:
            rows = _Trip.apply(Reorder.apply(rows, self._inverse, self._order), self._made)
        return rows


class _Trip(torch.autograd.Function):
    """Rows that are sent, and as many that are received, forward and backward."""

    @staticmethod
    def forward(context: Any, rows: Tensor, made: list[Made]) -> Tensor:
        context.made = made
        return _received(rows, made)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _received(gradient, context.made), None


def _received(rows: Tensor, made: list[Made]) -> Tensor:
    rows = rows.contiguous()
    made.append(("ep", "all-to-all", rows.nbytes))
    return torch.empty_like(rows)


class _LocalPart(torch.autograd.Function):
    """Whole → this tensor rank's part of the tokens; the gradient is gathered."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int, made: list[Made]) -> Tensor:
        context.ranks, context.made = ranks, made
        return x.chunk(ranks)[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, "tp", context.ranks, context.made), None, None


class _GatherParts(torch.autograd.Function):
    """Parts of the tokens → whole; of the gradient each rank takes its part."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int, made: list[Made]) -> Tensor:
        context.ranks = ranks
        return _gathered(x, "tp", ranks, made)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(context.ranks)[0], None, None


def _apply(function: type[torch.autograd.Function], ranks: int, made: list[Made], x: Tensor) -> Tensor:
    result: Tensor = function.apply(x, ranks, made)
    return result


def _gathered(part: Tensor, dimension: str, ranks: int, made: list[Made]) -> Tensor:
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    made.append((dimension, "all-gather", whole.nbytes))
    return whole


def _balance(run: SegmentRun, router: Router, made: list[Made]) -> Balance:
    """Its losses and its noise, as in a step."""
    balance = Balance(
        router.mixture, router.row + 1, run.micro_batch, run.micro_batch * run.sequence, torch.device("cpu")
    )
    balance.begin_step()
    if run.on_gpu:  # in one kernel
        setattr(balance, "noise", lambda row, tokens, logits: torch.empty(logits.shape))  # noqa: B010
    if run.tensor > 1:

        def over_sequence(asked: Tensor) -> Tensor:
            made.append(("sequence", "all-reduce", asked.nbytes))
            return asked

        balance.over_sequence = over_sequence
    return balance


def _whole_sequences(ranks: int, made: list[Made], chosen: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """As `parallel.expert.join_sequences` has it, of tensor ranks alone."""
    place = tokens.numbers(chosen)
    both = _gathered(torch.cat((place.unsqueeze(1), chosen), 1), "sequence", ranks, made)
    whole = torch.empty_like(both[:, 1:])
    whole[both[:, 0]] = both[:, 1:]
    return whole.unflatten(0, (-1, tokens.length)), place


# Kernels of a GPU.


def _in_one_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if x.shape[1] % 8 or weight.shape[1] % 8:
        return grouped_matmul(x, weight, counts)
    return functional.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


def _outer_in_one_kernel(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return functional.grouped_mm(y.t(), x, offs=counts.cumsum(0, dtype=torch.int32))


class _FusedSwiglu(torch.autograd.Function):
    """What the kernel reads, writes and keeps."""

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        context.save_for_backward(gate, up)
        return torch.add(gate, up)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = context.saved_tensors
        return torch.add(gate, gradient), torch.add(up, gradient)
