"""Context parallelism: every rank holds two chunks of each sequence (zigzag, `spec.sharding`), and attention brings its
queries together with all keys before them.

One form serves all methods. The ranks of an inner group trade heads for tokens, so that each holds all tokens of the
group for some of the heads (ulysses); the ranks of the outer group then bring in the keys and values of the others, in
a ring or by gathering them. The tokens of an inner group are two chunks again, of the outer group's zigzag."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation, uncompiled
from cuboid.kernels.recompute import SAVED
from cuboid.model.attention import causal_mix
from cuboid.model.batch import Documents
from cuboid.model.flash_attention import Attended, Gradients, attend, attend_backward
from cuboid.model.rope import Positions
from cuboid.parallel.collectives import all_gather, all_to_all, reduce_scatter, start_shift
from cuboid.parallel.groups import Group, Groups
from cuboid.spec.sharding import chunks_of, places_of


class ContextMix:
    """Takes the place of `causal_mix` where sequences are split over ranks."""

    def __init__(self, groups: Groups, gathers: bool) -> None:
        self._inner, self._outer = groups.context_inner, groups.context_outer
        self._gathers = gathers

    @uncompiled
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        inner = self._inner
        if inner.size > 1:
            # Ranks with fewer key-value heads than ranks repeat them, so that each gets those of its query heads.
            copies = math.lcm(key.shape[2], inner.size) // key.shape[2]
            key, value = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (key, value))
            query, key, value = _AllToAllHeads.apply(inner, False, query, key, value)
        if self._outer.size > 1:
            length = query.shape[1] * self._outer.size
            seen = _OuterAttention.apply(query, key, value, self._method(positions.documents, length))
        else:
            seen = causal_mix(query, key, value, positions)
        return _AllToAllHeads.apply(inner, True, seen)[0] if inner.size > 1 else seen

    def _method(self, documents: Documents | None, length: int) -> Ring | Gathering:
        kind = Gathering if self._gathers else Ring
        if documents is None:
            return kind(self._outer, length, None)
        if kind not in documents.kept:
            documents.kept[kind] = kind(self._outer, length, documents)
        found: Ring | Gathering = documents.kept[kind]
        return found


class Ring:
    """Keys and values travel from rank to rank while those at hand are computed with; gradients follow them."""

    def __init__(self, group: Group, length: int, documents: Documents | None) -> None:
        self._group = group
        sources = [(group.index - step) % group.size for step in range(group.size)]
        self._steps = [ring_blocks(group.index, source, group.size, documents, length) for source in sources]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen, packed = Seen(query, value), pack(key, value)
        for step, blocks in enumerate(self._steps):
            # In flight while this step's blocks compute; double-buffered, because `packed` is read until `wait`.
            coming = start_shift(packed, self._group) if step + 1 < len(self._steps) else None
            for block in blocks:
                seen.add(block, query, *unpack(packed, key, value))
            if coming is not None:
                packed = coming.wait()
        return seen.result, seen.sums

    def backward(self, gradient: Tensor, attended: Attended) -> Gradients:
        query, key, value, seen, sums = attended
        total, packed = torch.zeros_like(query), pack(key, value)
        own = following = None
        for step, blocks in enumerate(self._steps):
            coming = start_shift(packed, self._group) if step + 1 < len(self._steps) else None
            added = torch.zeros_like(packed)
            here = Attended(query, *unpack(packed, key, value), seen, sums)
            for block in blocks:
                block.add_gradients(gradient, here, (total, *unpack(added, key, value)))
            if step == 0:
                own = added
            else:
                # Travels one step behind its keys and values, and home after the last.
                following = start_shift(added if following is None else added.add_(following.wait()), self._group, 1)
            if coming is not None:
                packed = coming.wait()
        assert own is not None and following is not None
        return total, *unpack(own.add_(following.wait()), key, value)


class Gathering:
    """Every rank gathers all keys and values, again for the backward pass, and scatters the sum of their gradients."""

    def __init__(self, group: Group, length: int, documents: Documents | None) -> None:
        self._group = group
        self._blocks = gathered_blocks(group.index, group.size, documents, length)

    def _whole(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Gathered again in the backward pass: whole keys and values of every layer would not fit.
        rows = all_gather(pack(key, value).unsqueeze(0), self._group)
        apart = [torch.stack(parts) for parts in zip(*(unpack(row, key, value) for row in rows), strict=True)]
        return in_order(apart[0]), in_order(apart[1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen, whole = Seen(query, value), self._whole(key, value)
        for block in self._blocks:
            seen.add(block, query, *whole)
        return seen.result, seen.sums

    def backward(self, gradient: Tensor, attended: Attended) -> Gradients:
        query, key, value, seen, sums = attended
        whole = self._whole(key, value)
        total, keys, values = (torch.zeros_like(x) for x in (query, *whole))
        for block in self._blocks:
            block.add_gradients(gradient, Attended(query, *whole, seen, sums), (total, keys, values))
        rows = zip(by_rank(keys, self._group.size), by_rank(values, self._group.size), strict=True)
        summed = reduce_scatter(torch.stack([pack(*row) for row in rows]), self._group)
        return total, *unpack(summed[0], key, value)


def pack(key: Tensor, value: Tensor) -> Tensor:
    """Both in one message."""
    return torch.cat((key.flatten(), value.flatten()))


def unpack(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, in the shapes of a rank's own."""
    first, second = packed.split((key.numel(), value.numel()))
    return first.view(key.shape), second.view(value.shape)


def in_order(x: Tensor) -> Tensor:
    """(ranks, sequences, length, …) as each rank holds them → (sequences, ranks · length, …) as sequences go."""
    # Zigzag: rank r of n holds chunks r and 2n-1-r, so the late chunks lie in reverse order of ranks.
    early, late = x.chunk(2, dim=2)
    return torch.cat((early, late.flip(0))).movedim(0, 1).flatten(1, 2)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_order`."""
    early, late = x.unflatten(1, (2 * ranks, -1)).movedim(1, 0).chunk(2)
    return torch.cat((early, late.flip(0)), dim=2)


# Whole collectives are operations of their own, so that selective recomputation keeps their results, and only those.
_calls: dict[int, Any] = {}


@operation("cuboid::context_attention")
def _context_attention(query: Tensor, key: Tensor, value: Tensor, call: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _calls[call].forward(query, key, value)
    return result


@operation("cuboid::all_to_all_heads")
def _all_to_all_heads(tensors: list[Tensor], back: bool, call: int) -> list[Tensor]:
    group: Group = _calls[call]
    size = group.size
    # (sequences, length, heads, dim): to each rank its heads of my tokens, or, back, its tokens of my heads.
    parts = [by_rank(x, size) if back else x.unflatten(2, (size, -1)).movedim(2, 0) for x in tensors]
    sent = torch.cat([part.reshape(size, -1) for part in parts], dim=1)
    found = all_to_all(sent, group).split([part[0].numel() for part in parts], dim=1)
    shaped = [x.reshape(part.shape) for x, part in zip(found, parts, strict=True)]
    return [torch.cat(tuple(x), dim=2) if back else in_order(x) for x in shaped]


SAVED.update((_context_attention, _all_to_all_heads))


def _with(call: Any, operation: Any, *arguments: Any) -> Any:
    _calls[id(call)] = call
    try:
        return operation(*arguments, id(call))
    finally:
        del _calls[id(call)]


class _OuterAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, outer: Ring | Gathering) -> Tensor:
        context.outer = outer
        seen, sums = _with(outer, _context_attention, query, key, value)
        context.save_for_backward(query, key, value, seen, sums)
        return seen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *context.outer.backward(gradient, Attended(*context.saved_tensors)), None


class _AllToAllHeads(torch.autograd.Function):
    """Some heads of all tokens of the group for all heads of this rank's tokens, or back."""

    @staticmethod
    def forward(context: Any, group: Group, back: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        context.group, context.back = group, back
        return tuple(_with(group, _all_to_all_heads, list(tensors), back))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_with(context.group, _all_to_all_heads, list(gradients), not context.back)


# Attention of a context-parallel rank as blocks of queries × keys: only those that the causal mask, and documents, do
# not hide entirely.


@dataclass(frozen=True)
class Block:
    rows: slice
    """Which sequences."""
    queries: slice
    """Of the tokens a rank holds."""
    keys: slice
    """Of the keys at hand."""
    causal: bool
    """Queries and keys are the same tokens, and each sees those up to itself; else every query sees every key."""
    documents: Documents | None = None
    """Of a causal block."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*self._cut(query, key, value), self.causal, self.documents)

    def add_gradients(self, gradient: Tensor, attended: Attended, total: Gradients) -> None:
        """What this block adds to the gradients of queries, keys and values is added to `total`."""
        gradient, seen = (x[self.rows, self.queries] for x in (gradient, attended.seen))
        sums = attended.sums[self.rows, :, self.queries]
        part = Attended(*self._cut(*attended[:3]), seen, sums)
        added = attend_backward(gradient, part, self.causal, self.documents)
        for whole, chunk in zip(self._cut(*total), added, strict=True):
            whole += chunk

    def _cut(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query[self.rows, self.queries], key[self.rows, self.keys], value[self.rows, self.keys]


def ring_blocks(index: int, source: int, size: int, documents: Documents | None, length: int) -> list[Block]:
    """The queries of rank `index` against the keys of rank `source`, of sequences of this length."""
    chunk = length // (2 * size)
    every, early, late = slice(0, 2 * chunk), slice(0, chunk), slice(chunk, 2 * chunk)
    if source == index:
        return [_causal(every, every, documents, index, size, length)]
    # Both chunks of a rank before this one are earlier than the late chunk, and the early one than both.
    queries, keys = (every, early) if source < index else (late, every)
    if documents is None:
        return [Block(slice(None), queries, keys, causal=False)]
    ids = [documents.ids[:, _places(rank, size, length)] for rank in (index, source)]
    return list(_full(queries, keys, *ids))


def gathered_blocks(index: int, size: int, documents: Documents | None, length: int) -> list[Block]:
    """The queries of rank `index` against the keys of whole sequences; causal blocks first, which meet every query."""
    chunk = length // (2 * size)
    causal, full = [], []
    for place, number in enumerate(chunks_of(index, size)):
        queries = slice(place * chunk, (place + 1) * chunk)
        same, before = slice(number * chunk, (number + 1) * chunk), slice(0, number * chunk)
        part = documents.take(torch.arange(same.start, same.stop)) if documents is not None else None
        causal.append(Block(slice(None), queries, same, True, part))
        if number and documents is None:
            full.append(Block(slice(None), queries, before, causal=False))
        elif number and documents is not None:
            full += _full(queries, before, documents.ids[:, _places(index, size, length)], documents.ids)
    return causal + full


def _places(index: int, size: int, length: int) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in places_of(index, size, length)])


def _causal(queries: slice, keys: slice, documents: Documents | None, index: int, size: int, length: int) -> Block:
    # What is left of a document in the chunks of one rank is contiguous: their tokens are in order.
    part = documents.take(_places(index, size, length)) if documents is not None else None
    return Block(slice(None), queries, keys, True, part)


def _full(queries: slice, keys: slice, query_ids: Tensor, key_ids: Tensor) -> Iterator[Block]:
    """All keys are before all queries, so at most one document of a sequence reaches from them into these: it ends the
    keys and begins the queries."""
    for row, (after, before) in enumerate(zip(query_ids[:, queries], key_ids[:, keys], strict=True)):
        if after[0] == before[-1]:
            until = queries.start + int((after == after[0]).sum())
            since = keys.stop - int((before == after[0]).sum())
            yield Block(slice(row, row + 1), slice(queries.start, until), slice(since, keys.stop), causal=False)


class Seen:
    """What queries have seen of the blocks so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._dtype = query.dtype
        wide = torch.float32 if query.element_size() < 4 else query.dtype
        # float32, as a kernel that saw all keys at once would have added: a sum over blocks in bf16 would round each
        # time.
        self._seen = query.new_empty((*query.shape[:3], value.shape[3]), dtype=wide)
        self.sums = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=wide)

    def add(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> None:
        """A causal block is the first that its queries meet."""
        part, part_sums = block.attend(query, key, value)
        seen, sums = self._seen[block.rows, block.queries], self.sums[block.rows, :, block.queries]
        if block.causal:
            seen.copy_(part)
            sums.copy_(part_sums)
            return
        # Online softmax: both parts are normalised by their own sums; weigh each by its part of the sum of both.
        total = torch.logaddexp(sums, part_sums)
        seen.mul_(_by_token(sums - total)).add_(part * _by_token(part_sums - total))
        sums.copy_(total)

    @property
    def result(self) -> Tensor:
        return self._seen.to(self._dtype)


def _by_token(logarithms: Tensor) -> Tensor:
    return logarithms.exp().transpose(1, 2).unsqueeze(3)
