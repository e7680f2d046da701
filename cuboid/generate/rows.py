"""What one rank computes of a step: a row for each token, of sequences of any lengths, one after another.

Nothing is padded to the longest: a token is a row, and only attention knows which sequence a row belongs to. With
context parallelism the token at position p of a sequence is a row of rank p modulo cp, which also keeps its key and
value; every rank has as many rows as the fullest, the missing ones behind its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.generate.step import Step
from cuboid.model.rope import Positions, PositionTable


@dataclass(frozen=True, kw_only=True)
class StepPositions(Positions):
    """What layers must know of the rows of one rank, and attention of the step."""

    step: Step
    slots: Tensor
    """(rows that are tokens)"""
    places: Tensor
    """Where in its slot of this rank's cache each goes."""
    mask: Tensor | None
    """Of a step that decodes: (slots from the first to the last, 1, 1, places), whom each query sees."""
    queries: Tensor
    """Of a step that decodes: which row of the mask belongs to each token."""


@dataclass(frozen=True)
class Rows:
    """What one rank computes of a step."""

    tokens: Tensor
    """(1, rows)"""
    positions: StepPositions
    asked: Tensor
    """The rows for which logits are wanted,"""
    answers: Tensor
    """and their numbers among those of all context ranks."""


class Rower:
    """Makes the rows of one rank."""

    def __init__(self, table: PositionTable, index: int, size: int, multiple: int, device: torch.device) -> None:
        """`index`, `size`: of the context ranks; `multiple`: what the number of rows must divide by."""
        self._table, self._index, self._size = table, index, size
        self._multiple, self._device = multiple, device

    def rows(self, step: Step) -> Rows:
        tokens: list[int] = []
        index: list[int] = []
        slots, asked, answers = [], [], []
        answer = 0
        for span in step.spans:
            first = (self._index - span.start) % self._size
            own = range(span.start + first, span.stop, self._size)
            wanted = range(span.stop - span.asked, span.stop)
            asked += [len(tokens) + number for number, position in enumerate(own) if position in wanted]
            answers += [answer + position - wanted.start for position in own if position in wanted]
            answer += span.asked
            tokens += span.tokens[first :: self._size]
            index += own
            slots += [span.slot] * len(own)
        missing = self.count(step) - len(tokens)
        places = self._tensor([position // self._size for position in index])
        table = self._table.at(torch.tensor([index + [0] * missing]))
        mask, queries = self._mask(step) if self._size == 1 else (None, [])
        positions = StepPositions(
            table.index,
            table.cosine,
            table.sine,
            step=step,
            slots=self._tensor(slots),
            places=places,
            mask=mask,
            queries=self._tensor(queries),
        )
        return Rows(self._tensor(tokens + [0] * missing)[None], positions, self._tensor(asked), self._tensor(answers))

    def count(self, step: Step) -> int:
        """Rows of every rank."""
        fullest = max(self._held(step, index) for index in range(self._size))
        return max(1, -(-fullest // self._multiple)) * self._multiple

    def _held(self, step: Step, index: int) -> int:
        """Tokens of a context rank."""
        return sum(
            len(range(span.start + (index - span.start) % self._size, span.stop, self._size)) for span in step.spans
        )

    def _mask(self, step: Step) -> tuple[Tensor | None, list[int]]:
        if not step.decodes or not step.spans:
            return None, []
        slots = [span.slot for span in step.spans]
        lengths = torch.ones(
            max(slots) - min(slots) + 1, dtype=torch.int64
        )  # a free slot sees one token, whatever it is
        lengths[torch.tensor(slots) - min(slots)] = torch.tensor([span.stop for span in step.spans])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return mask[:, None, None].to(self._device), [slot - min(slots) for slot in slots]

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)
