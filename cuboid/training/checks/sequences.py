"""Hidden states of whole sequences from what the ranks of one replica hold of them, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.parallel.collectives import all_gather
from cuboid.parallel.parallelize import Engine
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.sharding import places_of


class Sequences:
    def __init__(self, engine: Engine) -> None:
        layout, groups = engine.run.layout, engine.groups
        self._groups = (groups.tensor, groups.context_inner, groups.context_outer)
        self._cp, self._tp = layout.cp, layout.tp
        self._here = groups.coordinates
        self._samples = layout.micro_batch_of(groups.coordinates.dp)
        # What blocks of one's own hand on is whole on every tensor rank.
        self._splits = layout.sequence_parallel and layout.tp > 1 and not isinstance(engine.run.model, PythonModelSpec)

    def gather(self, x: Tensor) -> Tensor:
        """(cp, tp, …): what each rank has. All ranks of the replica's stage call this."""
        x = x.detach().contiguous().unsqueeze(0)
        for group in self._groups:
            x = all_gather(x, group)
        return x.view(self._cp, self._tp, *x.shape[1:])

    def whole(self, parts: Tensor) -> Tensor:
        """(tokens, hidden), sequence after sequence, of `gather`'s result."""
        if self._cp == 1 and not self._splits:
            return parts[0, 0]
        chunks = parts.flatten(1, 2) if self._splits else parts[:, 0]
        if self._cp == 1:
            return chunks[0]
        chunks = chunks.view(self._cp, self._samples, -1, *chunks.shape[2:])
        whole = chunks.new_empty(self._samples, self._cp * chunks.shape[2], *chunks.shape[3:])
        for index, chunk in enumerate(chunks):
            whole[:, self._places(index, whole.shape[1]).to(whole.device)] = chunk
        return whole.flatten(0, 1)

    def own(self, whole: Tensor) -> Tensor:
        """What this rank has of it."""
        if self._cp > 1:
            sequences = whole.view(self._samples, -1, *whole.shape[1:])
            whole = sequences[:, self._places(self._here.cp, sequences.shape[1]).to(whole.device)].flatten(0, 1)
        if not self._splits:
            return whole
        chunks = whole.chunk(self._tp)
        return chunks[self._here.tp]

    def _places(self, index: int, length: int) -> Tensor:
        return torch.cat([torch.arange(part.start, part.stop) for part in places_of(index, self._cp, length)])
