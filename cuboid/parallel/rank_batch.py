"""What one rank sees of a micro-batch: with context parallelism, its chunks of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cuboid.model.batch import IGNORED, Further, MicroBatch, further
from cuboid.model.custom import Model, counted_labels
from cuboid.model.dropout import NUMBERS, on_device, token_keys
from cuboid.model.rope import Positions, PositionTable
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.spec.sharding import places_of


@dataclass(frozen=True)
class RankBatch:
    """Every stage gets it, whichever part of it its segments read."""

    tokens: Tensor
    """(sequences, length)"""
    labels: Tensor
    positions: Positions
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """All that a model of one's own reads."""
    count: Callable[[Mapping[str, Tensor]], Tensor] = counted_labels
    further: tuple[Further, ...] = ()
    """For each prediction layer."""

    def counted_further(self, depth: int) -> Tensor:
        """How many losses a prediction layer sums."""
        return (self.further[depth].labels != IGNORED).sum()

    @property
    def inputs(self) -> list[Tensor]:
        """What differs between micro-batches of one shape without documents."""
        keys = self.positions.dropout
        further = [x for each in self.further for x in each]
        return [self.tokens, self.labels, *(() if keys is None else (keys,)), *further]

    def cloned(self) -> RankBatch:
        """With `inputs` of its own."""
        keys = self.positions.dropout
        positions = replace(self.positions, dropout=None if keys is None else keys.clone())
        further = tuple(Further(*(x.clone() for x in each)) for each in self.further)
        tokens, labels = self.tokens.clone(), self.labels.clone()
        return replace(self, tokens=tokens, labels=labels, positions=positions, further=further)

    @property
    def counted(self) -> Tensor:
        """How many losses are summed."""
        return self.count(self.fields or {"labels": self.labels})


class BatchSharder:
    def __init__(self, run: Run, index: int, tensor: int, dtype: torch.dtype, device: torch.device) -> None:
        """`index`, `tensor`: of this rank among the context-parallel ranks, and among the tensor-parallel ones."""
        sequence, size = run.training.sequence, run.layout.cp
        self._places = torch.cat([torch.arange(part.start, part.stop) for part in places_of(index, size, sequence)])
        self._table = PositionTable(run.model, sequence, dtype, device)
        # Made once: without documents every micro-batch has the same positions.
        self._positions = self._table.at(self._places.unsqueeze(0))
        here = self._places.to(device)
        self._own = here if size > 1 else None
        self._drawn = here if run.training.dropout else None
        self._part = (run.layout.tp, tensor) if run.layout.sequence_parallel else (1, 0)
        """Of the residual stream's tokens: how many parts they have, and which of them is here."""
        self._data = run.data
        self._depths = range(1, run.model.prediction_layers + 1)
        self._dtype = dtype
        built = run.model.built if isinstance(run.model, PythonModelSpec) else None
        self._custom = built if isinstance(built, Model) else None

    def of(self, batch: MicroBatch, trains: bool = True) -> RankBatch:
        """`trains`: numbers are dropped where the run or its model asks for it."""
        positions = self._positions
        if self._custom is not None:
            given = batch.fields or {"tokens": batch.tokens, "labels": batch.labels}
            # Images and the like are computed with: in the precision of the weights.
            fields = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in given.items()}
            if trains and batch.numbers is not None and self._custom.drops:
                fields[NUMBERS] = on_device(batch.numbers, batch.tokens.device)
            return RankBatch(batch.tokens, batch.labels, positions, fields, self._custom.count)
        # Within documents positions begin anew at each, and attention ends there.
        if batch.documents is not None:
            positions = self._table.of(self._places, batch.documents, self._data, batch.cut)
        if trains and self._drawn is not None and batch.numbers is not None:
            parts, own = self._part
            positions = replace(positions, dropout=token_keys(batch.numbers, self._drawn).chunk(parts)[own])
        # Of whole sequences, so that a chunk's last token has its further ones too.
        found = [Further(batch.tokens, batch.labels), *(further(batch, depth) for depth in self._depths)]
        if self._own is not None:
            # This rank's two zigzag chunks, early and late; RoPE's positions are those of the whole sequence.
            found = [Further(*(x[:, self._own] for x in each)) for each in found]
        return RankBatch(found[0].tokens, found[0].labels, positions, further=tuple(found[1:]))
