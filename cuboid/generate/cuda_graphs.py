"""Decoding of one batch in tensors that stay where they are: every slot has its row, whether a sequence is in it or
not. A GPU then replays a token's thousand kernels as one graph: the host would take longer to start them than they run.

Only what is known before the graph is made may depend on the sequences: how far the longest reaches, in steps of
`WIDTH` places, each with a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cuboid.console import say
from cuboid.generate.batch import Span, Step
from cuboid.generate.build import Stage
from cuboid.generate.cache import StepPositions
from cuboid.model.rope import PositionTable

WIDTH = 256
ALIGNMENT = 16


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class FixedDecoder:
    def __init__(
        self, stage: Stage, table: PositionTable, slots: range, places: int, like: Tensor, records: bool
    ) -> None:
        """`records`: replay graphs, as long as recording them works."""
        self._records = records
        self._stage, self._table, self._slots, self._places, self._like = stage, table, slots, places, like
        self._step = Step(tuple(Span(slot, 0, (0,), 1) for slot in slots))
        self._given = torch.zeros(3, len(slots), dtype=torch.int64, device=like.device)
        """Of each slot the token, its position, and where its key and value go."""
        self._recorded: dict[int, _Recorded] = {}

    def __call__(self, step: Step) -> Tensor:
        """The logits of a step with one token of every sequence of the batch. A free slot computes token 0 at position
        0, and keeps that in its own first place, which the next prompt writes over."""
        given = [[0] * len(self._slots), [0] * len(self._slots), [slot * self._places for slot in self._slots]]
        rows = [span.slot - self._slots.start for span in step.spans]
        for row, span in zip(rows, step.spans, strict=True):
            given[0][row], given[1][row] = span.tokens[0], span.start
            given[2][row] += span.start
        self._given.copy_(torch.tensor(given))
        longest = max(span.stop for span in step.spans)
        logits = self._logits(min(-(-longest // WIDTH) * WIDTH, self._places))
        return logits if len(rows) == len(self._slots) else logits[rows]

    def _logits(self, width: int) -> Tensor:
        if self._records and width not in self._recorded:
            try:
                self._recorded[width] = self._record(partial(self._compute, width))
            except RuntimeError as error:
                self._records = False
                say(f"every token is decoded kernel by kernel, for no graph can be recorded: {error}", as_warning=True)
        if not self._records:
            return self._compute(width)
        self._recorded[width].graph.replay()
        return self._recorded[width].logits

    def _compute(self, width: int) -> Tensor:
        tokens, index, kept = self._given.split(1)
        table = self._table.at(index)
        hidden = torch.arange(width, device=self._like.device) > index.t()
        # Fused attention reads masks in blocks of 16 bytes, and would copy this one in every layer to make it so.
        padded = -(-width // ALIGNMENT) * ALIGNMENT
        mask = self._like.new_zeros(len(hidden), 1, 1, padded)[..., :width]
        mask.masked_fill_(hidden[:, None, None], -torch.inf)
        positions = StepPositions(
            table.index,
            table.cosine,
            table.sine,
            windowed=table.windowed,
            step=self._step,
            kept=kept[0],
            mask=mask,
            queries=None,
        )
        return self._stage.logits(self._stage.hidden(tokens, positions))

    def _record(self, compute: partial[Tensor]) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._recorded.values())).graph.pool() if self._recorded else None
        here, apart = torch.cuda.current_stream(), torch.cuda.Stream()
        # A recording that fails leaves its stream in place of the one before.
        with torch.cuda.stream(here):
            # Libraries make their work space at the first call, which must not be in the graph.
            apart.wait_stream(here)
            with torch.cuda.stream(apart):
                compute()
            here.wait_stream(apart)
            # Other threads, of a training say, may continue using the GPU.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = compute()
        return _Recorded(graph, logits)
