"""Attention through low-rank latents (DeepSeek's MLA): queries, keys and values are made from two short vectors per
token, and RoPE rotates a part of each head that has a projection of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cuboid.model.attention import HeadPeaks, Mix, causal_mix
from cuboid.model.linear import ColumnLinear, Linear, Norm, RowLinear, sliced_columns
from cuboid.model.rope import Positions, neighbours_apart, rotate, yarn_magnitude
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import REPLICATED, Split

EPSILON = 1e-6
"""Of the norms of latents, whatever the other norms have."""


class MultiLatentAttention(nn.Module):
    """Input and output are (batch · length, hidden): tokens of all sequences one after another."""

    # Latents are short, and heads are made of all of them: every tensor rank computes them.
    sharding: Mapping[str, Split] = {
        "query_down.*": REPLICATED,
        "query_down_norm.*": REPLICATED,
        "key_value_down.*": REPLICATED,
        "key_value_down_norm.*": REPLICATED,
    }

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        assert model.latent is not None
        self.latent = latent = model.latent
        query = model.heads * (latent.qk_nope_dim + latent.qk_rope_dim)
        if latent.q_rank:
            self.query_down = Linear(model.hidden, latent.q_rank, bias=False)
            self.query_down_norm = Norm(model, latent.q_rank, EPSILON)
            self.query_up = ColumnLinear(latent.q_rank, query, bias=False)
        else:
            self.query = ColumnLinear(model.hidden, query, bias=False)
        self.key_value_down = Linear(model.hidden, latent.kv_rank + latent.qk_rope_dim, bias=False)
        self.key_value_down_norm = Norm(model, latent.kv_rank, EPSILON)
        self.key_value_up = ColumnLinear(latent.kv_rank, model.heads * (latent.qk_nope_dim + latent.v_dim), bias=False)
        self.output = RowLinear(model.heads * latent.v_dim, model.hidden, bias=False)
        self.query_scale = 1.0
        if model.yarn is not None and model.yarn.mscale_all_dim:
            self.query_scale = yarn_magnitude(model.yarn.factor, model.yarn.mscale_all_dim) ** 2
        self.mix: Mix = causal_mix
        self.peaks: HeadPeaks | None = None
        """Where somebody asks for them."""

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        latent = self.latent
        query, query_rope, key_value, key_rope = self.queries_and_latents(x, positions, self.key_value_up)
        heads = query.shape[2]
        kv_shape = (-1, positions.length, heads, latent.qk_nope_dim + latent.v_dim)
        key, value = key_value.view(kv_shape).split((latent.qk_nope_dim, latent.v_dim), -1)
        query = torch.cat((query, query_rope), -1)
        key = torch.cat((key, key_rope.expand(-1, -1, heads, -1)), -1)
        if self.query_scale != 1.0:
            query = query * self.query_scale
        if self.peaks is not None:
            self.peaks.see(query, key)
        return self.output(self.mix(query, key, value, positions).reshape(-1, heads * latent.v_dim))

    def queries_and_latents(
        self, x: Tensor, positions: Positions, up: Linear | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries by head, the part without RoPE and the rotated part; the latents of keys and values, or what
        `up` makes of them; and the rotated part of keys, the same for all heads."""
        latent, region = self.latent, self.output.region
        key_value, key_rope = self.key_value_down(x).split((latent.kv_rank, latent.qk_rope_dim), -1)
        key_value = self.key_value_down_norm(key_value)
        if latent.q_rank:
            query = self.query_down_norm(self.query_down(x))
            linears = (self.query_up, up, None)
            query, key_value, key_rope = sliced_columns(region, (query, key_value, key_rope), linears)
        else:
            query = self.query(x)
            key_value, key_rope = sliced_columns(region, (key_value, key_rope), (up, None))
        # The head counts come from the weights, so that a module holding a part of the heads works unchanged.
        heads = self.output.weight.shape[1] // latent.v_dim
        shape = (-1, positions.length, heads, latent.qk_nope_dim + latent.qk_rope_dim)
        query, query_rope = query.view(shape).split((latent.qk_nope_dim, latent.qk_rope_dim), -1)
        key_rope = self._rotate(key_rope.view(-1, positions.length, 1, latent.qk_rope_dim), positions)
        return query, self._rotate(query_rope, positions), key_value, key_rope

    def _rotate(self, x: Tensor, positions: Positions) -> Tensor:
        return rotate(neighbours_apart(x) if self.latent.interleaved else x, positions)
