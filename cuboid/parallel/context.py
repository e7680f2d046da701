"""Context parallelism: every rank holds two chunks of each sequence (zigzag, `spec.sharding`), and attention brings its
queries together with all keys before them.

One form serves all methods. The ranks of an inner group trade heads for tokens, so that each holds all tokens of the
group for some of the heads (ulysses); the ranks of the outer group then bring in the keys and values of the others, in
a ring or by gathering them. The tokens of an inner group are two chunks again, of the outer group's zigzag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation, uncompiled
from cuboid.kernels.recompute import SAVED
from cuboid.model.attention import causal_mix
from cuboid.model.attention_operation import add_sinks, attention_mix, sinks_gradient
from cuboid.model.batch import Documents
from cuboid.model.flash_attention import Attended, Gradients
from cuboid.model.rope import Positions
from cuboid.parallel.collectives import (
    Pending,
    all_gather,
    all_to_all,
    reduce_scatter,
    start_distant_shift,
    start_shift,
)
from cuboid.parallel.context_blocks import Run, Seen, gathered_blocks, ring_blocks, window_blocks
from cuboid.parallel.groups import Group, Groups
from cuboid.spec.sharding import places_of, seen_places


class ContextMix:
    """Takes the place of `causal_mix` where sequences are split over ranks."""

    def __init__(self, groups: Groups, gathers: bool, window: int = 0, cap: float = 0.0) -> None:
        """`window`: tokens that a query sees, itself included; 0: all before it. `cap`: of scores; 0: none."""
        self._inner, self._outer = groups.context_inner, groups.context_outer
        self._gathers, self._window, self._cap = gathers, window, cap

    @uncompiled
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, sinks: Tensor | None = None
    ) -> Tensor:
        inner = self._inner
        if inner.size > 1:
            # Ranks with fewer key-value heads than ranks repeat them, so that each gets those of its query heads.
            copies = math.lcm(key.shape[2], inner.size) // key.shape[2]
            key, value = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (key, value))
            query, key, value = _AllToAllHeads.apply(inner, False, query, key, value)
            sinks = None if sinks is None else sinks.chunk(inner.size)[inner.index]  # of the heads that came
        if self._outer.size > 1:
            length = query.shape[1] * self._outer.size
            seen = _OuterAttention.apply(query, key, value, sinks, self._method(positions.documents, length))
        elif self._window or self._cap or sinks is not None:
            seen = attention_mix(query, key, value, positions.edges, self._window, sinks, self._cap)
        else:
            seen = causal_mix(query, key, value, positions)
        return _AllToAllHeads.apply(inner, True, seen)[0] if inner.size > 1 else seen

    def _method(self, documents: Documents | None, length: int) -> Method:
        if documents is None:
            return self._make(length, None)
        key = (ContextMix, self._gathers, self._window)
        if key not in documents.kept:
            documents.kept[key] = self._make(length, documents)
        found: Method = documents.kept[key]
        return found

    def _make(self, length: int, documents: Documents | None) -> Method:
        if self._gathers:
            return Gathering(self._outer, length, documents, self._window, self._cap)
        if self._window:
            return WindowRing(self._outer, length, documents, self._window, self._cap)
        return Ring(self._outer, length, documents, self._cap)


class Ring:
    """Keys and values travel from rank to rank while those at hand are computed with; gradients follow them."""

    def __init__(self, group: Group, length: int, documents: Documents | None, cap: float = 0.0) -> None:
        self._group, self._cap = group, cap
        sources = [(group.index - step) % group.size for step in range(group.size)]
        self._steps = [ring_blocks(group.index, source, group.size, documents, length) for source in sources]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen, packed = Seen(query, value, self._cap), pack(key, value)
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
                block.add_gradients(gradient, here, (total, *unpack(added, key, value)), self._cap)
            if step == 0:
                own = added
            else:
                # Travels one step behind its keys and values, and home after the last.
                following = start_shift(added if following is None else added.add_(following.wait()), self._group, 1)
            if coming is not None:
                packed = coming.wait()
        assert own is not None and following is not None
        return total, *unpack(own.add_(following.wait()), key, value)


class WindowRing:
    """Keys and values go straight to the ranks that see them in their window, and only those that these see; a rank
    computes with what has come while the next is on its way. Gradients go back the same way."""

    def __init__(self, group: Group, length: int, documents: Documents | None, window: int, cap: float = 0.0) -> None:
        self._group, self._cap = group, cap
        index, size = group.index, group.size
        own, chunk = places_of(index, size, length), length // (2 * size)
        self._steps = [Sent.of(group, step, length, window) for step in range(1, size)]
        here = [Run(places, place * chunk) for place, places in enumerate(own)]
        self._blocks = [window_blocks(here, here, window, documents)]
        for sent in self._steps:
            self._blocks.append(window_blocks(here, sent.arriving, window, documents))

    def _start(self, step: int, key: Tensor, value: Tensor) -> Pending:
        sent = self._steps[step]
        # (sequences, heads, numbers of a key and of a value)
        token = key.shape[0] * key.shape[2] * (key.shape[3] + value.shape[3])
        parts = [x[:, place] for x in (key, value) for place in sent.leaving]
        packed = torch.cat([part.flatten() for part in parts]) if parts else key.new_empty(0)
        return start_distant_shift(packed, self._group, step + 1, token * sent.comes, token * sent.most)

    def _unpacked(self, packed: Tensor, step: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Views of what came: keys and values one run after the other."""
        shapes = [
            (x.shape[0], len(run.places), *x.shape[2:]) for x in (key, value) for run in self._steps[step].arriving
        ]
        parts = [
            part.view(shape) for part, shape in zip(packed.split([math.prod(s) for s in shapes]), shapes, strict=True)
        ]
        half = len(parts) // 2
        return torch.cat(parts[:half], 1), torch.cat(parts[half:], 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen, at_hand = Seen(query, value, self._cap), (key, value)
        for step, blocks in enumerate(self._blocks):
            coming = self._start(step, key, value) if step < len(self._steps) else None
            for block in blocks:
                seen.add(block, query, *at_hand)
            if coming is not None and self._steps[step].comes:
                at_hand = self._unpacked(coming.wait(), step, key, value)
            elif coming is not None:
                coming.wait()
        return seen.result, seen.sums

    def backward(self, gradient: Tensor, attended: Attended) -> Gradients:
        query, key, value, seen, sums = attended
        total, own = torch.zeros_like(query), (torch.zeros_like(key), torch.zeros_like(value))
        at_hand, added = (key, value), own
        returning: list[tuple[int, Pending]] = []
        for step, blocks in enumerate(self._blocks):
            coming = self._start(step, key, value) if step < len(self._steps) else None
            here = Attended(query, *at_hand, seen, sums)
            for block in blocks:
                block.add_gradients(gradient, here, (total, *added), self._cap)
            if step:
                returning.append((step - 1, self._return(step - 1, added, key, value)))
            if coming is not None:
                packed = coming.wait()
                if self._steps[step].comes:
                    at_hand = self._unpacked(packed, step, key, value)
                    added = torch.zeros_like(at_hand[0]), torch.zeros_like(at_hand[1])
                else:
                    added = at_hand = (key[:, :0], value[:, :0])
        for step, pending in returning:
            self._add(pending.wait(), step, own)
        return total, *own

    def _return(self, step: int, added: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> Pending:
        sent = self._steps[step]
        token = key.shape[0] * key.shape[2] * (key.shape[3] + value.shape[3])
        runs = [x[:, run.at : run.at + len(run.places)] for x in added for run in sent.arriving]
        packed = torch.cat([run.flatten() for run in runs]) if runs else key.new_empty(0)
        return start_distant_shift(packed, self._group, -(step + 1), token * sent.leaves, token * sent.most, tag=1)

    def _add(self, packed: Tensor, step: int, own: tuple[Tensor, Tensor]) -> None:
        targets = [x[:, place] for x in own for place in self._steps[step].leaving]
        for target, part in zip(targets, packed.split([target.numel() for target in targets]), strict=True):
            target += part.view(target.shape)


@dataclass(frozen=True)
class Sent:
    """What ranks send one another that are so many steps apart in a ring: tokens, of which a rank sends some of its own
    and gets some of another's."""

    leaving: list[slice]
    arriving: list[Run]
    most: int
    """Tokens that any rank of the group sends over this distance."""

    @classmethod
    def of(cls, group: Group, distance: int, length: int, window: int) -> Sent:
        size, index, chunk = group.size, group.index, length // (2 * group.size)
        counts = [sum(map(len, seen_places((one + distance) % size, one, size, length, window))) for one in range(size)]
        leaving = []
        for places in seen_places((index + distance) % size, index, size, length, window):
            late = places.start >= length // 2
            begin = places_of(index, size, length)[late].start
            leaving.append(slice(late * chunk + places.start - begin, late * chunk + places.stop - begin))
        arriving, at = [], 0
        for places in seen_places(index, (index - distance) % size, size, length, window):
            arriving.append(Run(places, at))
            at += len(places)
        return cls(leaving, arriving, max(counts))

    @property
    def leaves(self) -> int:
        return sum(each.stop - each.start for each in self.leaving)

    @property
    def comes(self) -> int:
        return sum(len(run.places) for run in self.arriving)


class Gathering:
    """Every rank gathers all keys and values, again for the backward pass, and scatters the sum of their gradients."""

    def __init__(
        self, group: Group, length: int, documents: Documents | None, window: int = 0, cap: float = 0.0
    ) -> None:
        self._group, self._cap = group, cap
        self._blocks = gathered_blocks(group.index, group.size, documents, length, window)

    def _whole(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Gathered again in the backward pass: whole keys and values of every layer would not fit.
        rows = all_gather(pack(key, value).unsqueeze(0), self._group)
        apart = [torch.stack(parts) for parts in zip(*(unpack(row, key, value) for row in rows), strict=True)]
        return in_order(apart[0]), in_order(apart[1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen, whole = Seen(query, value, self._cap), self._whole(key, value)
        for block in self._blocks:
            seen.add(block, query, *whole)
        return seen.result, seen.sums

    def backward(self, gradient: Tensor, attended: Attended) -> Gradients:
        query, key, value, seen, sums = attended
        whole = self._whole(key, value)
        total, keys, values = (torch.zeros_like(x) for x in (query, *whole))
        for block in self._blocks:
            block.add_gradients(gradient, Attended(query, *whole, seen, sums), (total, keys, values), self._cap)
        rows = zip(by_rank(keys, self._group.size), by_rank(values, self._group.size), strict=True)
        summed = reduce_scatter(torch.stack([pack(*row) for row in rows]), self._group)
        return total, *unpack(summed[0], key, value)


Method = Ring | WindowRing | Gathering


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
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, outer: Method) -> Tensor:
        context.outer = outer
        seen, sums = _with(outer, _context_attention, query, key, value)
        if sinks is not None:
            seen, sums = add_sinks(seen, sums, sinks)
        context.save_for_backward(query, key, value, seen, sums, sinks)
        return seen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = context.saved_tensors
        attended = Attended(*saved)
        added = None if sinks is None else sinks_gradient(gradient, attended, sinks)
        return *context.outer.backward(gradient, attended), added, None


class _AllToAllHeads(torch.autograd.Function):
    """Some heads of all tokens of the group for all heads of this rank's tokens, or back."""

    @staticmethod
    def forward(context: Any, group: Group, back: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        context.group, context.back = group, back
        return tuple(_with(group, _all_to_all_heads, list(tensors), back))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_with(context.group, _all_to_all_heads, list(gradients), not context.back)
