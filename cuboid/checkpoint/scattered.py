"""A full tensor of which this rank holds some boxes, in the form `torch.distributed.checkpoint` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from cuboid.checkpoint.boxes import Box


@dataclass(frozen=True)
class Scattered:
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[Box, Tensor], ...]
    """Each box with its values, a view of what the rank really holds, so that loading fills it in place."""
    near: tuple[Tensor, ...] = ()
    """Of halved values: `boxes` hold the rest, these what it is the rest of. Such can be saved, not filled."""

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box, _ in self.boxes]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def at(self, index: MetadataIndex) -> Tensor:
        """The values of one box."""
        for box, values in self.boxes:
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return values
        raise KeyError(f"{index.fqn} has no box at {index.offset}")

    def size(self) -> torch.Size:
        return torch.Size(self.full_shape)


class LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """The default one rebuilds what it does not know; a `Scattered` must stay itself, because loading fills it."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held: Scattered = self.state_dict[index.fqn]
        return held.at(index)
