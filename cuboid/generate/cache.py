"""The keys and values of one layer for the sequences in flight, and attention of new tokens to them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.generate.rows import StepPositions
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.rope import Positions
from cuboid.parallel.collectives import all_gather, all_to_all
from cuboid.parallel.groups import Group
from cuboid.spec.generation import CacheShape


class Cache:
    """Takes the place of `causal_mix`: keeps the keys and values of a step's tokens, then lets its queries see all of
    their sequences. A query head reads one key-value head of equal, consecutive groups, or the one `served` says."""

    def __init__(self, shape: CacheShape, context: Group, served: Tensor | None, like: Tensor) -> None:
        # Zeros, because a place nobody may see must still be a number.
        sizes = shape.slots, shape.places, shape.heads
        self._key = like.new_zeros(*sizes, shape.key)
        self._value = like.new_zeros(*sizes, shape.value) if shape.value else None
        self._context, self._served = context, served

    @property
    def bytes(self) -> int:
        return self._key.nbytes + (0 if self._value is None else self._value.nbytes)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        return self.attend(query, key, value, positions, 1 / math.sqrt(query.shape[3]))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, scale: float) -> Tensor:
        """(1, rows, heads, dim); rows that are no tokens give zeros."""
        assert isinstance(positions, StepPositions)
        count, width = positions.kept.numel(), value.shape[3]
        self._key.flatten(0, 1).index_copy_(0, positions.kept, key[0, :count])
        if self._value is not None:
            self._value.flatten(0, 1).index_copy_(0, positions.kept, value[0, :count])
        if self._context.size > 1:
            return self._over_context(query, width, positions, scale)
        found = (self._decode if positions.step.decodes else self._prefill)(query[0, :count], width, positions, scale)
        if count == query.shape[1]:
            return found.unsqueeze(0)
        seen = query.new_zeros(*query.shape[:3], width)
        seen[0, :count] = found
        return seen

    def _kept(self, slots: slice, places: int, width: int) -> tuple[Tensor, Tensor]:
        """(slots, heads, places, dim)"""
        key = self._key[slots, :places].transpose(1, 2)
        value = key[..., :width] if self._value is None else self._value[slots, :places].transpose(1, 2)
        if self._served is None:
            return key, value
        return key.index_select(1, self._served), value.index_select(1, self._served)

    def _decode(self, query: Tensor, width: int, positions: StepPositions, scale: float) -> Tensor:
        """One query per sequence, all sequences at once. Query heads that share a key-value head stand where several
        queries would: no key is copied."""
        mask, queries = positions.mask, positions.queries
        if mask is None:
            return query.new_zeros(0, query.shape[1], width)
        first = min(span.slot for span in positions.step.spans)
        key, value = self._kept(slice(first, first + mask.shape[0]), mask.shape[3], width)
        grouped = query.unflatten(1, (key.shape[1], -1))
        if queries is not None:
            grouped = grouped.new_zeros(mask.shape[0], *grouped.shape[1:]).index_copy_(0, queries, grouped)
        seen = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale).flatten(1, 2)
        return seen if queries is None else seen.index_select(0, queries)

    def _prefill(self, query: Tensor, width: int, positions: StepPositions, scale: float) -> Tensor:
        parts, row = [], 0
        for span in positions.step.spans:
            count = len(span.tokens)
            key, value = self._kept(slice(span.slot, span.slot + 1), span.stop, width)
            mask = None
            if span.start:
                mask = torch.ones(count, span.stop, dtype=torch.bool, device=query.device).tril(span.start)
            seen = functional.scaled_dot_product_attention(
                query[row : row + count].transpose(0, 1).unsqueeze(0),
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
            parts.append(seen[0].transpose(0, 1))
            row += count
        return torch.cat(parts)

    def _over_context(self, query: Tensor, width: int, positions: StepPositions, scale: float) -> Tensor:
        """Every rank lets all queries of the step see what it keeps; each then combines what its own saw."""
        group, rows = self._context, query.shape[1]
        found = query.new_zeros(group.size, rows, query.shape[2], width + 1)
        found[..., width] = -math.inf
        gathered = all_gather(query[0].contiguous(), group).unflatten(0, (group.size, rows))
        taken = [0] * group.size
        for span in positions.step.spans:
            for rank in range(group.size):
                own = range(span.start + (rank - span.start) % group.size, span.stop, group.size)
                here = slice(taken[rank], taken[rank] + len(own))
                taken[rank] += len(own)
                # Key j of this rank stands at position j · size + index.
                visible = [(position - group.index) // group.size + 1 for position in own]
                if visible and visible[-1] > 0:
                    kept = self._kept(slice(span.slot, span.slot + 1), visible[-1], width)
                    found[rank, here] = _attend(gathered[rank, here], *kept, visible, scale)
        parts = all_to_all(found, group)
        seen, sums = parts[..., :width], parts[..., width:]
        weights = (sums - sums.amax(0)).nan_to_num_(nan=0.0).exp()
        return (seen * (weights / weights.sum(0))).sum(0).unsqueeze(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: list[int], scale: float) -> Tensor:
    """What each query (rows, heads, dim) sees of its first `visible` keys, and behind it the logarithm of its sum of
    exponentials."""
    wide = torch.float32 if query.element_size() < 4 else query.dtype
    grouped = query.transpose(0, 1).unflatten(0, (key.shape[1], -1)).to(wide)
    scores = grouped @ key.transpose(2, 3).to(wide).transpose(0, 1) * scale
    limits = torch.tensor(visible, device=query.device)
    scores.masked_fill_(torch.arange(key.shape[2], device=query.device) >= limits[:, None], -math.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    weights = (scores - sums).nan_to_num_(nan=-math.inf).exp()
    seen = weights @ value.transpose(0, 1).to(wide)
    return torch.cat((seen, sums), -1).flatten(0, 1).transpose(0, 1).to(query.dtype)


# Attention through latents that keeps only these: heads are never made of the tokens before.
#
# A query takes the half of `key_value_up` that makes keys upon itself, sees latents as keys and as values, and what it
# saw goes through the other half: the same matmuls in another order.


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
        query, query_rotated, key_value, key_rotated = self.whole.queries_and_latents(x, positions)
        heads = query.shape[2]
        up = self.up.view(heads, latent.qk_nope_dim + latent.v_dim, latent.kv_rank)
        for_keys, for_values = up.split((latent.qk_nope_dim, latent.v_dim), 1)
        query = torch.bmm(query[0].transpose(0, 1), for_keys).transpose(0, 1)
        query = torch.cat((query.unsqueeze(0), query_rotated), -1)
        value = key_value.view(1, -1, 1, latent.kv_rank)
        key = torch.cat((value, key_rotated), -1)
        seen = self.cache.attend(query, key, value, positions, self.scale)
        seen = torch.bmm(seen[0].transpose(0, 1), for_values.transpose(1, 2)).transpose(0, 1)
        return self.whole.output(seen.reshape(-1, heads * latent.v_dim))
