"""What one rank computes of a step: a row for each token, of sequences of any lengths, one after another.

Nothing is padded to the longest: a token is a row, and only attention knows which sequence a row belongs to. With
context parallelism the token at position p of a sequence is a row of rank p modulo cp, which also keeps its key and
value; every rank has as many rows as the fullest, the missing ones behind its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.generate.batch import Step
from cuboid.model.rope import Positions, PositionTable
from cuboid.parallel.groups import Group


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
