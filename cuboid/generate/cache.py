"""The keys and values of one layer for the sequences in flight, and attention of new tokens to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.generate.batch import Span, Step
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.rope import Positions, PositionTable
from cuboid.parallel.collectives import all_gather, all_to_all
from cuboid.parallel.groups import Group
from cuboid.spec.generation import CacheShape

# What one rank computes of a step: a row for each token, of sequences of any lengths, one after another.
#
# Nothing is padded to the longest: a token is a row, and only attention knows which sequence a row belongs to. With
# context parallelism the token at position p of a sequence is a row of rank p modulo cp, which also keeps its key and
# value; every rank has as many rows as the fullest, the missing ones behind its own.


@dataclass(frozen=True, kw_only=True)
class StepPositions(Positions):
    """What layers must know of the rows of one rank, and attention of the step."""

    step: Step
    kept: Tensor
    """(rows that are tokens): where the key and value of each go, slot · places + place."""
    mask: Tensor | None
    """Of a step that decodes: (slots from the first to the last, 1, 1, places), added to the scores of each query."""
    queries: Tensor | None
    """Of a step that decodes: which row of the mask belongs to each token; None: each its own."""


@dataclass(frozen=True)
class Rows:
    """What one rank computes of a step."""

    tokens: Tensor
    """(1, rows)"""
    positions: StepPositions
    asked: list[int]
    """The rows for which logits are wanted,"""
    answers: list[int]
    """and their numbers among those of all context ranks."""


class Rower:
    """Makes the rows of one rank."""

    def __init__(self, table: PositionTable, context: Group, places: int, multiple: int, like: Tensor) -> None:
        """`places`: of a slot in this rank's cache; `multiple`: what the number of rows must divide by; `like`: has the
        dtype and the device."""
        self._table, self._index, self._size, self._places = table, context.index, context.size, places
        self._multiple, self._like = multiple, like

    def rows(self, step: Step) -> Rows:
        tokens: list[int] = []
        index: list[int] = []
        kept: list[int] = []
        asked, answers, answer = [], [], 0
        for span in step.spans:
            first = (self._index - span.start) % self._size
            own = range(span.start + first, span.stop, self._size)
            for position in own[-span.asked :] if span.asked else ():
                if position >= span.stop - span.asked:
                    asked.append(len(tokens) + (position - own.start) // self._size)
                    answers.append(answer + position - span.stop + span.asked)
            answer += span.asked
            tokens += span.tokens[first :: self._size]
            index += own
            kept += [span.slot * self._places + position // self._size for position in own]
        missing = [0] * (self.count(step) - len(tokens))
        # One tensor, because every copy to a device costs as much as a kernel.
        packed = torch.tensor([tokens + missing, index + missing, kept + missing]).to(self._like.device)
        table = self._table.at(packed[1:2])
        mask, queries = self._mask(step) if self._size == 1 else (None, None)
        positions = StepPositions(
            table.index,
            table.cosine,
            table.sine,
            windowed=table.windowed,
            step=step,
            kept=packed[2, : len(kept)],
            mask=mask,
            queries=queries,
        )
        return Rows(packed[:1], positions, asked, answers)

    def count(self, step: Step) -> int:
        """Rows of every rank."""
        fullest = max(self._held(step, index) for index in range(self._size))
        return max(1, -(-fullest // self._multiple)) * self._multiple

    def _held(self, step: Step, index: int) -> int:
        """Tokens of a context rank."""
        size = self._size
        return sum(len(range(span.start + (index - span.start) % size, span.stop, size)) for span in step.spans)

    def _mask(self, step: Step) -> tuple[Tensor | None, Tensor | None]:
        if not step.decodes or not step.spans:
            return None, None
        slots = [span.slot for span in step.spans]
        first, count = min(slots), max(slots) - min(slots) + 1
        lengths = [1] * count  # a free slot sees one token, whatever it is
        for span in step.spans:
            lengths[span.slot - first] = span.stop
        hidden = torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._like.dtype).masked_fill_(hidden, -torch.inf)
        queries = None if len(slots) == count else torch.tensor(slots).sub_(first).to(self._like.device)
        return mask[:, None, None].to(self._like.device), queries


class Asked(NamedTuple):
    """Tokens of a step in one layer, each (rows, heads, dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: StepPositions
    scale: float
    """What scores are multiplied by."""
    sinks: Tensor | None
    cap: float = 0.0
    """Of scores; 0: none."""


class Visible(NamedTuple):
    """Keys and values of one sequence, each (1, heads, places, dim)."""

    key: Tensor
    value: Tensor
    hidden: Tensor
    """(queries, places): what each query does not see."""


class Cache:
    """Takes the place of `causal_mix`: keeps the keys and values of a step's tokens, then lets its queries see all of
    their sequences. A query head reads one key-value head of equal, consecutive groups, or the one `served` says."""

    def __init__(self, shape: CacheShape, context: Group, served: Tensor | None, like: Tensor) -> None:
        # Zeros, because a place nobody may see must still be a number.
        sizes = shape.slots, shape.places, shape.heads
        self._key = like.new_zeros(*sizes, shape.key)
        self._value = like.new_zeros(*sizes, shape.value) if shape.value else None
        self._context, self._served = context, served
        self.cap = 0.0
        """Of scores; 0: none."""

    @property
    def bytes(self) -> int:
        return self._key.nbytes + (0 if self._value is None else self._value.nbytes)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, sinks: Tensor | None = None
    ) -> Tensor:
        return self.attend(query, key, value, positions, 1 / math.sqrt(query.shape[3]), sinks)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Positions,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(1, rows, heads, dim); rows that are no tokens give zeros. `sinks`: (heads)."""
        assert isinstance(positions, StepPositions)
        count, width = positions.kept.numel(), value.shape[3]
        asked = Asked(query[0, :count], key[0, :count], value[0, :count], positions, scale, sinks, self.cap)
        if self._context.size > 1:
            return self._over_context(query, width, asked)
        found = self._decode(asked) if positions.step.decodes else self._prefill(asked)
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

    def _keep(self, places: Tensor, key: Tensor, value: Tensor) -> None:
        self._key.flatten(0, 1).index_copy_(0, places, key)
        if self._value is not None:
            self._value.flatten(0, 1).index_copy_(0, places, value)

    def _kept_places(self, positions: StepPositions) -> Tensor:
        """Where the key and value of each token go."""
        return positions.kept

    def _decode(self, asked: Asked) -> Tensor:
        """One query per sequence, all sequences at once. Query heads that share a key-value head stand where several
        queries would: no key is copied."""
        query, positions, width = asked.query, asked.positions, asked.value.shape[2]
        self._keep(self._kept_places(positions), asked.key, asked.value)
        mask, queries = positions.mask, positions.queries
        if mask is None:
            return query.new_zeros(0, query.shape[1], width)
        first = min(span.slot for span in positions.step.spans)
        mask = mask[..., : self._key.shape[1]]
        key, value = self._kept(slice(first, first + mask.shape[0]), mask.shape[3], width)
        grouped = query.unflatten(1, (key.shape[1], -1))
        if queries is not None:
            grouped = grouped.new_zeros(mask.shape[0], *grouped.shape[1:]).index_copy_(0, queries, grouped)
        if asked.sinks is None and not asked.cap:
            seen = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=asked.scale)
        else:
            seen = _written_out(grouped, key, value, mask, asked)
        seen = seen.flatten(1, 2)
        return seen if queries is None else seen.index_select(0, queries)

    def _prefill(self, asked: Asked) -> Tensor:
        self._keep(self._kept_places(asked.positions), asked.key, asked.value)
        parts, row, query = [], 0, asked.query
        for span in asked.positions.step.spans:
            count = len(span.tokens)
            key, value = self._kept(slice(span.slot, span.slot + 1), span.stop, asked.value.shape[2])
            mask = None
            if span.start or asked.cap or asked.sinks is not None:
                mask = torch.ones(count, span.stop, dtype=torch.bool, device=query.device).tril(span.start)
            parts.append(seen_of(query[row : row + count], key, value, mask, asked))
            row += count
        return torch.cat(parts)

    def _visible(self, span: Span, rank: int, asked: Asked) -> Visible | None:
        """Of what this rank keeps, or has just been given, what the queries of a context rank see; None: nothing."""
        size, index = self._context.size, self._context.index
        own = range(span.start + (rank - span.start) % size, span.stop, size)
        # Key j of this rank stands at position j · size + index.
        visible = [(position - index) // size + 1 for position in own]
        if not visible or visible[-1] <= 0:
            return None
        key, value = self._kept(slice(span.slot, span.slot + 1), visible[-1], asked.value.shape[2])
        limits = torch.tensor(visible, device=key.device)
        return Visible(key, value, torch.arange(key.shape[2], device=key.device) >= limits[:, None])

    def _begin_context(self, asked: Asked) -> None:
        self._keep(self._kept_places(asked.positions), asked.key, asked.value)

    def _end_context(self, asked: Asked) -> None:
        """After all queries have seen what there is."""

    def _over_context(self, query: Tensor, width: int, asked: Asked) -> Tensor:
        """Every rank lets all queries of the step see what it keeps; each then combines what its own saw."""
        group, rows = self._context, query.shape[1]
        self._begin_context(asked)
        found = query.new_zeros(group.size, rows, query.shape[2], width + 1)
        found[..., width] = -math.inf
        gathered = all_gather(query[0].contiguous(), group).unflatten(0, (group.size, rows))
        taken = [0] * group.size
        for span in asked.positions.step.spans:
            for rank in range(group.size):
                count = len(range(span.start + (rank - span.start) % group.size, span.stop, group.size))
                here = slice(taken[rank], taken[rank] + count)
                taken[rank] += count
                visible = self._visible(span, rank, asked)
                if visible is not None:
                    found[rank, here] = _attend(gathered[rank, here], visible, asked.scale, asked.cap)
        self._end_context(asked)
        parts = all_to_all(found, group)
        seen, sums = parts[..., :width], parts[..., width:]
        if asked.sinks is not None:  # one more part, of which nothing is seen
            sink = asked.sinks.to(sums.dtype).view(1, 1, -1, 1).expand_as(sums[:1])
            seen, sums = torch.cat((seen, torch.zeros_like(seen[:1]))), torch.cat((sums, sink))
        weights = (sums - sums.amax(0)).nan_to_num_(nan=0.0).exp()
        return (seen * (weights / weights.sum(0))).sum(0).unsqueeze(0)


def seen_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: Asked) -> Tensor:
    """What queries (rows, heads, dim) of one sequence see of its keys (1, heads, places, dim), as `mask` (rows, places)
    says; without one each sees those up to itself."""
    if asked.sinks is None and not asked.cap:
        seen = functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=asked.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return seen[0].transpose(0, 1)
    assert mask is not None
    found = _attend(query, Visible(key, value, ~mask), asked.scale, asked.cap)
    seen, sums = found[..., :-1], found[..., -1:]
    return seen if asked.sinks is None else seen * torch.sigmoid(sums - asked.sinks.to(sums.dtype).unsqueeze(1))


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, asked: Asked) -> Tensor:
    """(slots, key-value heads, query heads of each, dim), with sinks, with a softcap, or with both."""
    wide = torch.float32 if query.element_size() < 4 else query.dtype
    scores = _capped(query.to(wide) @ key.transpose(2, 3).to(wide) * asked.scale, asked.cap) + mask
    if asked.sinks is None:
        weights = scores.softmax(-1)
    else:
        more = asked.sinks.view(key.shape[1], -1).to(wide).unsqueeze(2).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, more), -1).softmax(-1)[..., :-1]
    return (weights @ value.to(wide)).to(query.dtype)


def _capped(scores: Tensor, cap: float) -> Tensor:
    return torch.tanh(scores / cap) * cap if cap else scores


def _attend(query: Tensor, visible: Visible, scale: float, cap: float) -> Tensor:
    """What each query (rows, heads, dim) sees, and behind it the logarithm of its sum of exponentials."""
    key, value, hidden = visible
    wide = torch.float32 if query.element_size() < 4 else query.dtype
    grouped = query.transpose(0, 1).unflatten(0, (key.shape[1], -1)).to(wide)
    scores = _capped(grouped @ key.transpose(2, 3).to(wide).transpose(0, 1) * scale, cap)
    scores.masked_fill_(hidden, -math.inf)
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
