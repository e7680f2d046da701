"""Causal attention within documents, in a window, with sinks, and with a softcap of its scores.

Each pass is one operation to the compiler, so that a block with it is one graph. Where documents begin is an input as
tokens are: no graph is made anew for other documents, and nobody asks the device for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation
from cuboid.kernels.precision import wide
from cuboid.kernels.recompute import SAVED
from cuboid.model.batch import Edges
from cuboid.model.flash_attention import Attended, attend, attend_backward


@operation("cuboid::attention")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    sizes: Tensor | None,
    since: int | None,
    cap: float,
) -> tuple[Tensor, Tensor]:
    seen, sums = attend(query, key, value, True, _edges(places, sizes), since, cap)
    return seen.to(query.dtype).contiguous(), sums.contiguous()


@torch.library.register_fake("cuboid::attention")  # type: ignore[untyped-decorator]
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    sizes: Tensor | None,
    since: int | None,
    cap: float,
) -> tuple[Tensor, Tensor]:
    sequences, length, heads, _ = query.shape
    seen = query.new_empty(sequences, length, heads, value.shape[3])
    return seen, query.new_empty(sequences, heads, length, dtype=wide(query.dtype))


@operation("cuboid::attention_backward")
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    sums: Tensor,
    places: Tensor | None,
    sizes: Tensor | None,
    since: int | None,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    attended = Attended(query, key, value, seen, sums)
    parts = attend_backward(gradient, attended, True, _edges(places, sizes), since, cap)
    first, second, third = (part.to(query.dtype).contiguous() for part in parts)
    return first, second, third


@torch.library.register_fake("cuboid::attention_backward")  # type: ignore[untyped-decorator]
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    sums: Tensor,
    places: Tensor | None,
    sizes: Tensor | None,
    since: int | None,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (x.new_empty(x.shape) for x in (query, key, value))
    return first, second, third


SAVED.add(_forward)


def _edges(places: Tensor | None, sizes: Tensor | None) -> Edges | None:
    return None if places is None or sizes is None else Edges(places, sizes)


# Sinks: one more logit for each head, whose value is zero. A query sees less of everything else, by the part that the
# sink has of its sum of exponentials. With that sum and what is then seen, the backward pass of blocks is the same.


def add_sinks(seen: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`sinks`: (heads)."""
    total = torch.logaddexp(sums, _wide(sinks).unsqueeze(1).to(sums.dtype))
    kept = (sums - total).exp().transpose(1, 2).unsqueeze(3)
    return (seen * kept).to(seen.dtype), total


def sinks_gradient(gradient: Tensor, attended: Attended, sinks: Tensor) -> Tensor:
    """`attended`: with sinks."""
    whole = (_wide(gradient) * _wide(attended.seen)).sum(-1).transpose(1, 2)
    part = (_wide(sinks).unsqueeze(1).to(attended.sums.dtype) - attended.sums).exp()
    return -(part * whole).sum((0, 2)).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        places: Tensor | None,
        sizes: Tensor | None,
        since: int | None,
        cap: float,
    ) -> Tensor:
        seen, sums = _forward(query, key, value, places, sizes, since, cap)
        if sinks is not None:
            seen, sums = add_sinks(seen, sums, sinks)
        context.save_for_backward(query, key, value, seen, sums, sinks, places, sizes)
        context.since, context.cap = since, cap
        return seen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks, places, sizes = context.saved_tensors
        parts = _backward(gradient, *saved, places, sizes, context.since, context.cap)
        added = None if sinks is None else sinks_gradient(gradient, Attended(*saved), sinks)
        return *parts, added, None, None, None, None


def attention_mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Edges | None,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Causal attention, inside each document, in a window (0: in none), with sinks, with a softcap (0: without)."""
    since = 1 - window if 0 < window < query.shape[1] else None
    places, sizes = edges or (None, None)
    seen: Tensor = _Attention.apply(query, key, value, sinks, places, sizes, since, cap)
    return seen


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))
