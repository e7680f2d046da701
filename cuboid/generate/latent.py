"""Attention through latents that keeps only these: heads are never made of the tokens before.

A query takes the half of `key_value_up` that makes keys upon itself, sees latents as keys and as values, and what it
saw goes through the other half: the same matmuls in another order."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cuboid.generate.cache import Cache
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.rope import Positions


class CachedLatentAttention(nn.Module):
    def __init__(self, whole: MultiLatentAttention, cache: Cache) -> None:
        super().__init__()
        self.whole, self.cache = whole, cache
        self.up = whole.key_value_up.weight
        del whole.key_value_up
        latent = whole.latent
        self.scale = whole.query_scale / math.sqrt(latent.qk_nope_dim + latent.qk_rope_dim)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        latent = self.whole.latent
        query, query_turned, key_value, key_turned = self.whole.queries_and_latents(x, positions)
        heads = query.shape[2]
        up = self.up.view(heads, latent.qk_nope_dim + latent.v_dim, latent.kv_rank)
        for_keys, for_values = up.split((latent.qk_nope_dim, latent.v_dim), 1)
        query = torch.bmm(query[0].transpose(0, 1), for_keys).transpose(0, 1)
        query = torch.cat((query.unsqueeze(0), query_turned), -1)
        value = key_value.view(1, -1, 1, latent.kv_rank)
        key = torch.cat((value, key_turned), -1)
        seen = self.cache.attend(query, key, value, positions, self.scale)
        seen = torch.bmm(seen[0].transpose(0, 1), for_values.transpose(1, 2)).transpose(0, 1)
        return self.whole.output(seen.reshape(-1, heads * latent.v_dim))
