"""Fused QKV and fused gate-up: matmuls of the same rows made into one, because a decoding step has few rows, and takes
as long as it takes to begin each operation. Queries and keys are rotated (RoPE) together too, where they have no norms
of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.generate.cache import Cache
from cuboid.model.attention import Attention
from cuboid.model.feed_forward import FeedForward
from cuboid.model.linear import Linear
from cuboid.model.rope import Positions, rotate


def fuse(matmuls: Sequence[Linear]) -> Linear:
    """One matmul, of whose weight and bias theirs become parts: what is loaded into them later is in it."""
    weights = [matmul.weight for matmul in matmuls]
    if weights[0].stride(0) == 1:  # the columns of each lie together, and do so in the whole
        weight = torch.cat([each.t() for each in weights], 1).t()
    else:
        weight = torch.cat(tuple(weights))
    _take_parts(weights, weight)
    biases = [matmul.bias for matmul in matmuls if matmul.bias is not None]
    bias = torch.cat(tuple(biases)) if biases else None
    if bias is not None:
        _take_parts(biases, bias)
    with torch.device("meta"):
        fused = Linear(weight.shape[1], len(weight), bias is not None)
    fused.weight = nn.Parameter(weight, requires_grad=False)
    fused.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return fused


def _take_parts(parameters: Sequence[nn.Parameter], whole: Tensor) -> None:
    for parameter, part in zip(parameters, whole.split([len(each) for each in parameters]), strict=True):
        parameter.data = part


class FusedAttention(nn.Module):
    def __init__(self, whole: Attention, cache: Cache) -> None:
        super().__init__()
        self.whole, self.cache = whole, cache
        self.heads = [len(each.weight) // whole.head_dim for each in (whole.query, whole.key, whole.value)]
        self.fused = fuse((whole.query, whole.key, whole.value))
        del whole.query, whole.key, whole.value

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        made = self.fused(x).view(1, x.shape[0], -1, self.whole.head_dim)
        if self.whole.query_norm is not None and self.whole.key_norm is not None:
            query, key, value = made.split(self.heads, 2)
            query, key = self.whole.query_norm(query), self.whole.key_norm(key)
            query, key = rotate(query, positions), rotate(key, positions)
        else:
            queries, keys, values = self.heads
            both, value = made.split((queries + keys, values), 2)
            query, key = rotate(both, positions).split((queries, keys), 2)
        return self.whole.output(self.cache(query, key, value, positions).reshape(x.shape[0], -1))


class FusedFeedForward(nn.Module):
    def __init__(self, gate: Linear, whole: FeedForward) -> None:
        super().__init__()
        self.fused = fuse((gate, whole.up))
        self.down = whole.down

    def forward(self, x: Tensor, _: Positions) -> Tensor:
        gate, up = self.fused(x).chunk(2, 1)
        return self.down(functional.silu(gate) * up)


def fused_feed_forward(whole: FeedForward) -> FeedForward | FusedFeedForward:
    return whole if whole.gate is None else FusedFeedForward(whole.gate, whole)
