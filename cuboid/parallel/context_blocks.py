"""Attention of a context-parallel rank as blocks of queries × keys: only those that the causal mask, a window and
documents do not hide entirely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.model.batch import Documents, Edges
from cuboid.model.flash_attention import Attended, Gradients, attend, attend_backward
from cuboid.spec.sharding import chunks_of, places_of, seen_of


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a sequence."""

    places: range
    at: int
    """Where the first of them lies among the tokens at hand."""


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
    since: int | None = None
    """Of a window: query i of the block sees no key before key i + since of it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """`cap`: of scores; 0: none."""
        return attend(*self._cut(query, key, value), self.causal, self._edges(query), self.since, cap)

    def add_gradients(self, gradient: Tensor, attended: Attended, total: Gradients, cap: float) -> None:
        """What this block adds to the gradients of queries, keys and values is added to `total`."""
        gradient, seen = (x[self.rows, self.queries] for x in (gradient, attended.seen))
        sums = attended.sums[self.rows, :, self.queries]
        part = Attended(*self._cut(*attended[:3]), seen, sums)
        added = attend_backward(gradient, part, self.causal, self._edges(gradient), self.since, cap)
        for whole, chunk in zip(self._cut(*total), added, strict=True):
            whole += chunk

    def _edges(self, x: Tensor) -> Edges | None:
        return None if self.documents is None else self.documents.edges(x.device)

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


def gathered_blocks(index: int, size: int, documents: Documents | None, length: int, window: int = 0) -> list[Block]:
    """The queries of rank `index` against the keys of whole sequences; causal blocks first, which meet every query."""
    chunk = length // (2 * size)
    if window:
        asking = [Run(places, place * chunk) for place, places in enumerate(places_of(index, size, length))]
        blocks = []
        for run in asking:
            keys = [Run(places, places.start) for places in (run.places, range(run.places.start))]
            blocks += window_blocks([run], keys, window, documents)
        return sorted(blocks, key=lambda block: not block.causal)
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


def window_blocks(queries: Sequence[Run], keys: Sequence[Run], window: int, documents: Documents | None) -> list[Block]:
    """Causal blocks first, which meet every query. A run of keys is a run of queries, or all before those that see it
    and not cut by them."""
    causal: list[Block] = []
    full: list[Block] = []
    for asking in queries:
        here = slice(asking.at, asking.at + len(asking.places))
        for run in keys:
            if run.places == asking.places:
                part = None if documents is None else documents.take(torch.tensor(asking.places))
                since = 1 - window if window < len(asking.places) else None
                causal.append(Block(slice(None), here, slice(run.at, run.at + len(run.places)), True, part, since))
            elif len(run.places) and run.places.stop <= asking.places.start:
                full += _before(asking, run, window, documents)
    return causal + full


def _before(asking: Run, run: Run, window: int, documents: Documents | None) -> Iterator[Block]:
    """Blocks of keys that all stand before the queries."""
    queries, keys = asking.places, run.places
    if documents is None:
        block = _cut(asking, run, window, slice(None), queries, keys)
        if block is not None:
            yield block
        return
    ids = documents.ids[:, queries.start : queries.stop], documents.ids[:, keys.start : keys.stop]
    for row, (after, before) in enumerate(zip(*ids, strict=True)):
        # At most one document of a sequence reaches from the keys into the queries.
        if after[0] == before[-1]:
            until, since = int((after == after[0]).sum()), int((before == after[0]).sum())
            some, few = queries[:until], keys[len(keys) - since :]
            block = _cut(asking, run, window, slice(row, row + 1), some, few)
            if block is not None:
                yield block


def _cut(asking: Run, run: Run, window: int, rows: slice, queries: range, keys: range) -> Block | None:
    """A block without the keys that no query sees in its window, and without the queries that see none."""
    keys = seen_of(queries, keys, window)
    queries = range(queries.start, min(queries.stop, keys.stop - 1 + window))
    if not len(keys) or not len(queries):
        return None
    begin, first = asking.at + queries.start - asking.places.start, run.at + keys.start - run.places.start
    # Query number 0 sees keys from place queries.start - window + 1 on, and every other one from one place later.
    since = queries.start - window + 1 - keys.start
    return Block(
        rows,
        slice(begin, begin + len(queries)),
        slice(first, first + len(keys)),
        causal=False,
        since=since if since + len(queries) - 1 > 0 else None,
    )


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

    def __init__(self, query: Tensor, value: Tensor, cap: float) -> None:
        self._dtype, self._cap = query.dtype, cap
        wide = torch.float32 if query.element_size() < 4 else query.dtype
        # float32, as a kernel that saw all keys at once would have added: a sum over blocks in bf16 would round each
        # time.
        self._seen = query.new_empty((*query.shape[:3], value.shape[3]), dtype=wide)
        self.sums = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=wide)

    def add(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> None:
        """A causal block is the first that its queries meet."""
        part, part_sums = block.attend(query, key, value, self._cap)
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
