"""Causal self-attention with grouped key-value heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.model.attention_operation import attention_mix
from cuboid.model.linear import ColumnLinear, Norm, RowLinear, WholeNorm, columns, whole_norms
from cuboid.model.rope import Positions, rotate
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import COLUMN, PARTIAL, Split, heads

Mix = Callable[..., Tensor]
"""From queries, keys and values, each (sequences, length, heads, head_dim), and `Positions` to what each query head
sees. Of a model with sinks, these, a number for each query head, are one argument more."""


def causal_mix(query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
    """Every token sees itself and those before it in its sequence, or document. Each run of query heads reads one
    key-value head."""
    if positions.edges is not None:
        return attention_mix(query, key, value, positions.edges)
    mixed = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return mixed.transpose(1, 2)


@dataclass(frozen=True)
class WindowMix:
    """`causal_mix` of a layer with a window, with sinks, with a softcap, or with several of them."""

    window: int
    """Tokens that a query sees, itself included; 0: all before it."""
    cap: float = 0.0
    """Of its scores; 0: none."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, sinks: Tensor | None = None
    ) -> Tensor:
        if not self.window and not self.cap and sinks is None:
            return causal_mix(query, key, value, positions)
        return attention_mix(query, key, value, positions.edges, self.window, sinks, self.cap)


Project = Callable[[Tensor, Positions], tuple[Tensor, Tensor, Tensor]]
"""From tokens to queries, keys and values in the shapes that `Mix` takes them in."""


class HeadPeaks(NamedTuple):
    """The largest squared norms of a layer's queries and keys, by head, of all tokens seen since a step began."""

    query: Tensor
    key: Tensor

    @torch.no_grad()
    def see(self, query: Tensor, key: Tensor) -> None:
        """Each (sequences, length, heads, head_dim). Seeing tokens again, as recomputation does, changes nothing."""
        for peak, x in ((self.query, query), (self.key, key)):
            norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=peak.dtype)
            peak.copy_(torch.maximum(peak, norms.square().amax((0, 1))))


class Attention(nn.Module):
    """Input and output are (batch · length, hidden): tokens of all sequences one after another."""

    # Norms act on each head, of which a tensor rank sees its own.
    sharding: Mapping[str, Split] = {"query_norm.*": PARTIAL, "key_norm.*": PARTIAL, "sinks": COLUMN}

    def __init__(self, model: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        self.head_dim, self.window = model.head_dim, model.window_of(layer)
        kv_width, kv_split = model.kv_heads * model.head_dim, heads(model.kv_heads)
        self.query = ColumnLinear(model.hidden, model.heads * model.head_dim, model.qkv_bias)
        self.key = ColumnLinear(model.hidden, kv_width, model.qkv_bias, kv_split)
        self.value = ColumnLinear(model.hidden, kv_width, model.qkv_bias, kv_split)
        self.output = RowLinear(model.heads * model.head_dim, model.hidden, model.output_bias)
        self.query_norm: Norm | WholeNorm | None = None
        self.key_norm: Norm | WholeNorm | None = None
        if model.qk_norm_whole:
            self.query_norm = WholeNorm(model, model.heads * model.head_dim, COLUMN)
            self.key_norm = WholeNorm(model, kv_width, kv_split)
        elif model.qk_norm:
            self.query_norm, self.key_norm = Norm(model, model.head_dim), Norm(model, model.head_dim)
        self.query_scale = model.query_scale * model.head_dim**0.5 if model.query_scale else 1.0
        """What queries are multiplied by: attention itself divides by the root of head_dim."""
        # Which key-value head each query head reads; None: consecutive groups of equal size.
        self.kv_head_of_query: Tensor | None = None
        self.sinks = nn.Parameter(torch.empty(model.heads)) if model.sinks else None
        self.cap = model.attention_softcap
        self.mix: Mix = WindowMix(self.window, self.cap) if self.window or model.sinks or self.cap else causal_mix
        self.fused: Project | None = None
        """By one matmul, where something else knows how."""
        self.peaks: HeadPeaks | None = None
        """Where somebody asks for them."""

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        query, key, value = (self.fused or self._project)(x, positions)
        if self.query_scale != 1.0:
            query = query * self.query_scale
        if self.peaks is not None:
            self.peaks.see(query, key)
        if self.kv_head_of_query is not None:
            key, value = key.index_select(2, self.kv_head_of_query), value.index_select(2, self.kv_head_of_query)
        more = () if self.sinks is None else (self.sinks,)
        return self.output(self.mix(query, key, value, positions, *more).reshape(-1, self.output.weight.shape[1]))

    def _project(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        # The head counts come from the weights, so that a module holding a part of the heads works unchanged.
        shape = (-1, positions.length, self.query.weight.shape[0] // self.head_dim, self.head_dim)
        kv_shape = (-1, positions.length, self.key.weight.shape[0] // self.head_dim, self.head_dim)
        query, key, value = columns(x, (self.query, self.key, self.value))
        query, key, value = query.view(shape), key.view(kv_shape), value.view(kv_shape)
        query, key = self.normed(query, key)
        is_windowed = self.window > 0
        return rotate(query, positions, is_windowed), rotate(key, positions, is_windowed), value

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Where queries and keys have norms."""
        norms = self.query_norm, self.key_norm
        if isinstance(norms[0], WholeNorm) and isinstance(norms[1], WholeNorm):
            return whole_norms(query, key, (norms[0], norms[1]))
        if isinstance(norms[0], Norm) and isinstance(norms[1], Norm):
            return norms[0](query), norms[1](key)
        return query, key
