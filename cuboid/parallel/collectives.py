"""Collectives on dense tensors, whole and in parts along the first dimension; the one place that knows a backend's
habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.groups import Group

# Renamed in torch 2.13; the old names only warn there and are the only ones in 2.11.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way; `wait` returns its result."""

    def __init__(self, work: Any, result: Tensor, finish: Callable[[], Tensor] | None = None) -> None:
        self._work = work
        self._result = result
        self._finish = finish

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """Sum in place."""
    if group.handle is None:
        return Pending(None, x)
    return Pending(dist.all_reduce(x, group=group.handle, async_op=True), x)


def start_all_gather(part: Tensor, group: Group, into: Tensor | None = None) -> Pending:
    """Concatenate the parts of all ranks along the first dimension."""
    if group.handle is None:
        return Pending(None, part if into is None else into.copy_(part))
    if into is None:
        into = part.new_empty((part.shape[0] * group.size, *part.shape[1:]))
    return Pending(_all_gather(into, part.contiguous(), group=group.handle, async_op=True), into)


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """Sum over all ranks; each keeps its part along the first dimension."""
    if group.handle is None:
        return Pending(None, x)
    shape = (x.shape[0] // group.size, *x.shape[1:])
    if dist.get_backend(group.handle) == "gloo":
        # Its own reduce-scatter is an all-reduce in disguise; a direct exchange moves half the bytes, in one hop.
        received = torch.empty_like(x)
        work = dist.all_to_all_single(received, x.contiguous(), group=group.handle, async_op=True)
        return Pending(work, received, lambda: _sum_rows(received.view(group.size, *shape)))
    part = x.new_empty(shape)
    return Pending(_reduce_scatter(part, x.contiguous(), group=group.handle, async_op=True), part)


def _fits(x: Tensor, group: Group) -> bool:
    return group.local is not None and x.nbytes <= group.local.slot_bytes and x.device.type == "cpu"


def _sum_rows(rows: Tensor) -> Tensor:
    """In rank order, and in float32 or better, so that every rank gets the same bits."""
    wide = torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype
    return rows.sum(0, dtype=wide).to(rows.dtype)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum in place."""
    if group.local is not None and _fits(x, group):
        return x.copy_(group.local.exchange(x, lambda rows: _sum_rows(rows).view(x.shape)))
    return start_all_reduce(x, group).wait()


def all_reduce_maximum(x: Tensor, group: Group) -> Tensor:
    """Largest in place."""
    if group.local is not None and _fits(x, group):
        return x.copy_(group.local.exchange(x, lambda rows: rows.amax(0).view(x.shape)))
    if group.handle is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


def all_gather(part: Tensor, group: Group) -> Tensor:
    """Concatenate the parts of all ranks along the first dimension."""
    if group.local is not None and _fits(part, group):
        return group.local.exchange(part, lambda rows: rows.clone().view(-1, *part.shape[1:]))
    return start_all_gather(part, group).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over all ranks; each keeps its part along the first dimension."""
    if group.local is not None and _fits(x, group):
        length = x.numel() // group.size
        own = slice(group.index * length, (group.index + 1) * length)
        return group.local.exchange(x, lambda rows: _sum_rows(rows[:, own]).view(-1, *x.shape[1:]))
    return start_reduce_scatter(x, group).wait()
