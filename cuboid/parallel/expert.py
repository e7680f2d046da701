"""Expert parallelism: experts spread over the ranks of a group, tokens travelling to them and back.

Every rank of the group routes tokens of its own. Rows leave in the order of experts, which is the order of ranks too,
arrive rank by rank, and are sorted by expert there. Collectives begin before shared experts compute and end after,
forward and backward.

The host must know how many rows go where, and waits for that once a layer, in the forward pass: recomputation and the
backward pass have it from there. The device permutes rows meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.pinned_memory import HostCopy
from cuboid.kernels.recompute import remembered
from cuboid.model.load_balancing import Balance, Tokens
from cuboid.model.moe import RoutedExperts
from cuboid.model.router import Reorder, Router, order_arrivals
from cuboid.parallel.collectives import Pending, all_gather, all_reduce, start_all_to_all
from cuboid.parallel.groups import Group, Groups
from cuboid.spec.run import Run
from cuboid.spec.sharding import places_of

HandOver = Callable[[], None]


def stay_on() -> None:
    """There is no other pass."""


class _Trip:
    """One collective of rows; its backward is the same the other way round."""

    def __init__(self, group: Group, send: list[int], receive: list[int], home: int, hand_over: HandOver) -> None:
        self.group, self.send, self.receive, self.hand_over = group, send, receive, hand_over
        self.home = home
        """How many rows it has where they are routed, which no routing changes: what is counted, both ways."""
        self.there: Pending | None = None
        self.back: Pending | None = None

    def start(self, rows: Tensor, send: list[int], receive: list[int]) -> Pending:
        self.group.count("all-to-all", self.home * rows.shape[1] * rows.element_size())
        return start_all_to_all(rows, send, receive, self.group)

    def wait(self, pending: Pending | None) -> Tensor:
        assert pending is not None
        self.hand_over()
        return pending.wait()

    def run(self, rows: Tensor) -> Tensor:
        return _Arrive.apply(_Depart.apply(rows, self), self)


class _Depart(torch.autograd.Function):
    """Its result is complete only after `_Arrive`."""

    @staticmethod
    def forward(context: Any, rows: Tensor, trip: _Trip) -> Tensor:
        context.trip = trip
        trip.there = trip.start(rows, trip.send, trip.receive)
        return trip.there.result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        trip = context.trip
        gradient, trip.back = trip.wait(trip.back), None
        return gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, trip: _Trip) -> Tensor:
        context.trip = trip
        trip.wait(trip.there)
        trip.there = None
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        trip = context.trip
        # The gradient leaves as soon as it is there; `_Depart.backward` waits, after what autograd runs in between
        # (shared experts).
        trip.back = trip.start(gradient, trip.receive, trip.send)
        return gradient, None  # a place holder of the right shape: what counts is on its way


class _Sizes:
    """How many rows each rank sends and receives, on the device and on their way to the host."""

    def __init__(self, group: Group, counts: Tensor) -> None:
        leaving = counts.view(group.size, -1)
        group.count("all-to-all", leaving.nbytes)
        if group.is_fake:
            self.arriving = _balanced(leaving)
        else:
            self.arriving = start_all_to_all(leaving, [1] * group.size, [1] * group.size, group).wait()
        """(ranks, experts held here)"""
        sums = torch.stack((leaving.sum(1), self.arriving.sum(1)))
        self._read: tuple[list[int], list[int]] | None = None
        if sums.is_cuda:
            # On a stream of its own, so that the host waits for these numbers and not for what the device is given to
            # do after them.
            stream = _copies(sums.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._copy = HostCopy(sums)
            sums.record_stream(stream)
        else:
            self._copy = HostCopy(sums)

    def read(self) -> tuple[list[int], list[int]]:
        """What is sent to each rank, and received from each."""
        if self._read is None:
            send, receive = self._copy.read()[0].tolist()
            self._read = (send, receive)
        return self._read


def _balanced(leaving: Tensor) -> Tensor:
    """What arrives from ranks that are not there: as much in all as leaves, the same for every expert but a row."""
    rows, places = leaving.sum(), torch.arange(leaving.numel(), device=leaving.device)
    return ((rows + places) // leaving.numel()).view_as(leaving).to(leaving.dtype)


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class AllToAllDispatch:
    """The journey of rows whose experts are spread over a group."""

    def __init__(self, group: Group, hand_over: HandOver, counts: Tensor) -> None:
        self._group, self._hand_over = group, hand_over
        # Recomputation routes alike, so the host's numbers of the forward pass hold: it does not wait for the device
        # again.
        self._sizes = remembered(lambda: _Sizes(group, counts))
        self.counts = self._sizes.arriving.sum(0)

    def leave(self, rows: Tensor) -> None:
        group, arriving = self._group, self._sizes.arriving
        send, receive = self._sizes.read()
        home, there = sum(send), sum(receive)
        # Rows beyond a capacity are routed nowhere: they stand behind the others and come back as zeros.
        self._stay = len(rows) - home
        self._there = _Trip(group, send, receive, home, self._hand_over)
        self._back = _Trip(group, receive, send, home, self._hand_over)
        self._rows = _Depart.apply(rows[:home], self._there)
        # Rows arrive by source rank, then expert; grouped matmuls want them by expert. Ranks stay in order, so sums
        # over rows do not depend on who sent first.
        self._order, self._inverse = order_arrivals(arriving, there)

    def arrive(self) -> tuple[Tensor, Tensor]:
        rows = _Arrive.apply(self._rows, self._there)
        return Reorder.apply(rows, self._order, self._inverse), self.counts

    def go_back(self, rows: Tensor) -> Tensor:
        rows = self._back.run(Reorder.apply(rows, self._inverse, self._order))
        return functional.pad(rows, (0, 0, 0, self._stay)) if self._stay else rows


def spread_experts(mixture: RoutedExperts, group: Group, hand_over: HandOver = stay_on) -> None:
    """`hand_over`: called where a pass would wait for rows, so that another pass may compute meanwhile."""
    if group.size > 1:
        mixture.depart = partial(AllToAllDispatch, group, hand_over)


def make_balance(run: Run, device: torch.device) -> Balance:
    assert run.model.mixture is not None
    mixture, batch = run.model.mixture, run.training.global_batch
    return Balance(mixture, run.model.routed_layers, batch, batch * run.training.sequence, device, run.training.seed)


def watched(router: Router, balance: Balance, layer: int, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run`, a block's forward pass, with its router's losses; statistics count it once, however often it is computed
    again."""
    router.balance, router.row = balance, layer - balance.mixture.first_dense_layers
    balance.recording = False

    def recorded(*arguments: Any) -> Tensor:
        balance.recording = True
        result = run(*arguments)
        balance.recording = False
        return result

    return recorded


def join_sequences(router: Router, balance: Balance, groups: Groups, run: Run) -> None:
    """Let a router see what concerns whole sequences, of which each context and each tensor rank holds a part."""
    group, length = groups.sequence, run.training.sequence
    if group.size == 1:
        return
    ranges = places_of(groups.coordinates.cp, run.layout.cp, length)
    places = torch.cat([torch.arange(part.start, part.stop) for part in ranges]).to(balance.statistics.device)
    balance.over_sequence = partial(all_reduce, group=group)

    def whole_sequences(chosen: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        numbers = tokens.numbers(chosen)
        place = numbers // tokens.length * length + places[numbers % tokens.length]
        both = all_gather(torch.cat((place.unsqueeze(1), chosen), 1), group)
        whole = torch.empty_like(both[:, 1:])
        whole[both[:, 0]] = both[:, 1:]
        return whole.unflatten(0, (-1, length)), place

    router.whole_sequences = whole_sequences
