"""The keys and values of a layer with a window: a ring of as many places as the window has tokens, in which each new
token takes the place of the one that nobody sees any more."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.generate.batch import Span
from cuboid.generate.cache import Asked, Cache, StepPositions, Visible, seen_of
from cuboid.parallel.groups import Group
from cuboid.spec.generation import CacheShape


class WindowCache(Cache):
    """The token at position p is kept at place p modulo the number of places. Several tokens of a sequence at once
    would overwrite what the first of them see: they are kept after all have seen."""

    def __init__(
        self, shape: CacheShape, context: Group, served: Tensor | None, like: Tensor, window: int, places: int
    ) -> None:
        """`places`: of a slot in layers without a window, by which `StepPositions.kept` counts."""
        super().__init__(shape, context, served, like)
        self._window, self._whole, self._places = window, places, shape.places

    def _kept_places(self, positions: StepPositions) -> Tensor:
        slots = positions.kept // self._whole
        return slots * self._places + positions.kept % self._whole % self._places

    def _prefill(self, asked: Asked) -> Tensor:
        parts, row = [], 0
        for span in asked.positions.step.spans:
            rows = slice(row, row + len(span.tokens))
            found = self._at_hand(span, asked, rows, range(span.start, span.stop))
            query = asked.query[rows]
            parts.append(seen_of(query, found.key, found.value, ~found.hidden, asked))
            row = rows.stop
        self._keep_last(asked)
        return torch.cat(parts)

    def _begin_context(self, asked: Asked) -> None:
        pass

    def _end_context(self, asked: Asked) -> None:
        self._keep_last(asked)

    def _visible(self, span: Span, rank: int, asked: Asked) -> Visible | None:
        size = self._context.size
        queries = range(span.start + (rank - span.start) % size, span.stop, size)
        row = 0
        for other in asked.positions.step.spans:
            rows = slice(row, row + len(self._own(other)))
            if other is span:
                break
            row = rows.stop
        found = self._at_hand(span, asked, rows, queries)
        return found if len(queries) and found.key.shape[2] else None

    def _own(self, span: Span) -> range:
        """Positions of a span whose tokens this rank has."""
        size, index = self._context.size, self._context.index
        return range(span.start + (index - span.start) % size, span.stop, size)

    def _at_hand(self, span: Span, asked: Asked, rows: slice, queries: range) -> Visible:
        """What is kept of the window before a span, and behind it the span's own tokens, which are these `rows`."""
        size, device = self._context.size, asked.key.device
        own = self._own(span)
        first = max(0, span.start - self._window + 1)
        before = range(first + (own.start - first) % size, span.start, size)
        places = torch.tensor([span.slot * self._places + position // size % self._places for position in before])
        places = places.to(device, torch.int64)
        assert self._value is not None
        key, value = (
            torch.cat((kept.flatten(0, 1).index_select(0, places), given[rows])).transpose(0, 1).unsqueeze(0)
            for kept, given in ((self._key, asked.key), (self._value, asked.value))
        )
        if self._served is not None:
            key, value = key.index_select(1, self._served), value.index_select(1, self._served)
        stands = torch.tensor([*before, *own], device=device)
        distance = torch.tensor(queries, device=device).unsqueeze(1) - stands
        return Visible(key, value, (distance < 0) | (distance >= self._window))

    def _keep_last(self, asked: Asked) -> None:
        """Of each span the tokens that later ones may see."""
        rows: list[int] = []
        row = 0
        for span in asked.positions.step.spans:
            count = len(self._own(span))
            rows += range(row + max(0, count - self._places), row + count)
            row += count
        chosen = torch.tensor(rows, dtype=torch.int64, device=asked.key.device)
        places = self._kept_places(asked.positions).index_select(0, chosen)
        self._keep(places, asked.key.index_select(0, chosen), asked.value.index_select(0, chosen))
