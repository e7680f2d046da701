"""Collectives on dense tensors, whole and in parts along the first dimension; the one place that knows a backend's
habits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.groups import Group
from cuboid.parallel.shm_collectives import sum_rows
from cuboid.telemetry.heartbeat import HEARTBEAT, Track, Wait

# Renamed in torch 2.13; the old names only warn there and are the only ones in 2.11.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective in flight; `wait` returns its result."""

    def __init__(
        self,
        work: Any,
        result: Tensor,
        finish: Callable[[], Tensor] | None = None,
        awaited: tuple[Track, Wait] | None = None,
    ) -> None:
        """`awaited`: what a rank that waits for it says that it waits in."""
        self._work = work
        self._awaited = awaited
        self._sequence = 0 if awaited is None else awaited[0].advance()
        self.result = result
        """Complete once `wait` has returned."""
        self._finish = finish

    def wait(self) -> Tensor:
        if self._awaited is not None:
            track, kind = self._awaited
            track.wait(kind, self._sequence)
        # On NCCL this orders streams; the host waits on gloo only.
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self.result = self._finish()
            self._finish = None
        if self._awaited is not None:
            HEARTBEAT.end_wait()
            self._awaited = None
        return self.result


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """Sum in place."""
    if group.handle is None:
        return Pending(None, x)
    group.count("all-reduce", x.nbytes)
    if group.local is not None:
        with group.track.collective("all-reduce"):
            return Pending(None, group.local.all_reduce(x, sum_rows))
    return Pending(dist.all_reduce(x, group=group.handle, async_op=True), x, None, (group.track, "all-reduce"))


def start_all_gather(
    part: Tensor, group: Group, into: Tensor | None = None, sizes: Sequence[int] | None = None
) -> Pending:
    """Concatenate the parts of all ranks along the first dimension. `sizes`: of flat parts that are not equal."""
    if group.handle is None:
        return Pending(None, part if into is None else into.copy_(part))
    if into is None:
        into = part.new_empty((sum(sizes) if sizes else part.shape[0] * group.size, *part.shape[1:]))
    group.count("all-gather", into.nbytes)
    if sizes is not None:
        return _start_uneven_all_gather(part, group, into, sizes)
    if group.local is not None:
        with group.track.collective("all-gather"):
            return Pending(None, group.local.all_gather(part, into))
    if group.is_fake:
        into.view(group.size, -1).copy_(part.reshape(1, -1))
        return Pending(None, into)
    work = _all_gather(into, part.contiguous(), group=group.handle, async_op=True)
    return Pending(work, into, None, (group.track, "all-gather"))


def _start_uneven_all_gather(part: Tensor, group: Group, into: Tensor, sizes: Sequence[int]) -> Pending:
    if group.local is not None:
        with group.track.collective("all-gather"):
            return Pending(None, group.local.uneven_all_gather(part, into, sizes))
    if group.is_fake:  # own numbers stand for those of others
        for row in into.split(list(sizes)):
            row[: len(part)].copy_(part[: len(row)])
        return Pending(None, into)
    awaited: tuple[Track, Wait] = (group.track, "all-gather")
    if group.is_gloo:  # its all-gather takes one size; this moves the same bytes
        sent = part.repeat(group.size)
        work = dist.all_to_all_single(
            into, sent, list(sizes), [len(part)] * group.size, group=group.handle, async_op=True
        )
        return Pending(work, into, None, awaited)
    # NCCL broadcasts each part, all of them in one group of calls.
    work = dist.all_gather(list(into.split(list(sizes))), part.contiguous(), group=group.handle, async_op=True)
    return Pending(work, into, None, awaited)


def _start_uneven_reduce_scatter(x: Tensor, group: Group, sizes: Sequence[int]) -> Pending:
    part = x.new_empty(sizes[group.index])
    if group.local is not None:
        with group.track.collective("reduce-scatter"):
            return Pending(None, group.local.uneven_reduce_scatter(x, part, sizes))
    if group.is_fake:
        return Pending(None, part.copy_(x.split(list(sizes))[group.index]).mul_(group.size))
    awaited: tuple[Track, Wait] = (group.track, "reduce-scatter")
    if group.is_gloo:
        received = x.new_empty(group.size * len(part))
        work = dist.all_to_all_single(
            received, x, [len(part)] * group.size, list(sizes), group=group.handle, async_op=True
        )
        return Pending(work, received, lambda: sum_rows(received.view(group.size, -1)), awaited)
    # NCCL reduces each part to its rank, all of them in one group of calls.
    work = dist.reduce_scatter(part, list(x.split(list(sizes))), group=group.handle, async_op=True)
    return Pending(work, part, None, awaited)


def start_reduce_scatter(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Pending:
    """Sum over all ranks; each keeps its part along the first dimension. `sizes`: of flat parts that are not equal."""
    if group.handle is None:
        return Pending(None, x)
    group.count("reduce-scatter", x.nbytes)
    if sizes is not None:
        return _start_uneven_reduce_scatter(x, group, sizes)
    part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    if group.local is not None:
        with group.track.collective("reduce-scatter"):
            return Pending(None, group.local.reduce_scatter(x, part))
    if group.is_fake:
        return Pending(None, torch.sum(x.view(group.size, *part.shape), 0, out=part))
    awaited: tuple[Track, Wait] = (group.track, "reduce-scatter")
    if group.is_gloo:
        # Its own reduce-scatter is an all-reduce in disguise; a direct collective moves half the bytes, in one hop.
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = dist.all_to_all_single(received, x.contiguous(), group=group.handle, async_op=True)
        return Pending(work, received, lambda: sum_rows(received.view(group.size, *part.shape)), awaited)
    return Pending(_reduce_scatter(part, x.contiguous(), group=group.handle, async_op=True), part, None, awaited)


def start_shift(x: Tensor, group: Group, tag: int = 0) -> Pending:
    """Send to the next rank of the ring, return what the rank before sent. `tag` tells shifts in flight apart."""
    if group.handle is None:
        return Pending(None, x)
    group.count("send", x.nbytes)
    if group.local is not None:
        with group.track.collective("shift"):
            return Pending(None, group.local.shift(x))
    # Gloo, which also serves ranks that share a GPU, sends from host memory only.
    device = torch.device("cpu") if group.is_gloo else x.device
    sent = x.contiguous().to(device)
    received = torch.empty_like(sent)
    after, before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
    both = [
        dist.P2POp(dist.isend, sent, after, group.handle, tag),
        dist.P2POp(dist.irecv, received, before, group.handle, tag),
    ]
    # Both at once: a rank that sent first and received then would wait for a neighbour that does the same.
    works = dist.batch_isend_irecv(both)

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return received.to(x.device)

    return Pending(None, received, finish, (group.track, "shift"))


def start_distant_shift(x: Tensor, group: Group, distance: int, comes: int, most: int, tag: int = 0) -> Pending:
    """Send a row of numbers to the rank so many places further in the ring, return the `comes` numbers of the rank as
    far behind. No message without numbers is sent. `most`: numbers that any rank of the group sends."""
    if not most:
        return Pending(None, x)
    if x.numel():
        group.count("send", x.nbytes)
    received = x.new_empty(comes)
    if group.local is not None:
        with group.track.collective("shift"):
            return Pending(None, group.local.distant_shift(x, distance, received, most))
    device = torch.device("cpu") if group.is_gloo else x.device
    sent, received = x.to(device), received.to(device)
    after, before = (group.ranks[(group.index + step) % group.size] for step in (distance, -distance))
    both = [dist.P2POp(dist.isend, sent, after, group.handle, tag)] if x.numel() else []
    both += [dist.P2POp(dist.irecv, received, before, group.handle, tag)] if comes else []
    works = dist.batch_isend_irecv(both) if both else []

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return received.to(x.device)

    return Pending(None, received, finish, (group.track, "shift"))


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Part r along the first dimension goes to rank r; returns the parts that came, in the order of ranks."""
    if group.handle is None:
        return x
    group.count("all-to-all", x.nbytes)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    with group.track.collective("all-to-all"):
        if group.local is not None:
            return group.local.all_to_all(x, received)
        dist.all_to_all_single(received, x.contiguous(), group=group.handle)
        return received


def start_all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Pending:
    """Rows of x go out, so many to each rank in order; so many come in from each. `send` sums to the rows of x."""
    x = x.contiguous()
    if group.handle is None:
        return Pending(None, x)
    # The host knows both lists before it calls: uneven all-to-all needs sizes on the host, on every backend.
    result = x.new_empty((sum(receive), *x.shape[1:]))
    if group.is_fake and len(x):
        whole, rest = divmod(len(result), len(x))  # own rows stand for those of others
        result[: whole * len(x)].view(whole, *x.shape).copy_(x)
        result[whole * len(x) :].copy_(x[:rest])
        return Pending(None, result)
    work = dist.all_to_all_single(result, x, receive, send, group=group.handle, async_op=True)
    return Pending(work, result, None, (group.track, "all-to-all"))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum in place."""
    return start_all_reduce(x, group).wait()


def all_reduce_maximum(x: Tensor, group: Group) -> Tensor:
    """Largest in place."""
    if group.handle is None:
        return x
    group.count("all-reduce", x.nbytes)
    with group.track.collective("all-reduce"):
        if group.local is not None:
            return group.local.all_reduce(x, lambda rows: rows.amax(0))
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
        return x


def all_gather(part: Tensor, group: Group) -> Tensor:
    """Concatenate the parts of all ranks along the first dimension."""
    return start_all_gather(part, group).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over all ranks; each keeps its part along the first dimension."""
    return start_reduce_scatter(x, group).wait()
