"""Reads the boxes a layout asks for, whoever wrote them."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import INDEX, Damage, Place
from cuboid.checkpoint.staging import as_bytes
from cuboid.resilience.pulse import PULSE

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


class Reader(StorageReader):
    def __init__(self, folder: Place, index: dict[str, Any] | None = None) -> None:
        """`index`: of this folder, checked already."""
        self._folder = locate(folder)
        self._index = check_index(self._folder) if index is None else index
        self.names = self._index.keys()

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """A `Damage` if it is of another model, whatever its manifest says."""
        for name, shape in shapes.items():
            held = self._index.get(name, {}).get("shape")
            if held != list(shape):
                reason = "lacks" if held is None else f"has {'×'.join(map(str, held))} elements in"
                raise Damage(self._folder, INDEX, f"{reason} {name}, which needs {'×'.join(map(str, shape))}")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """`storage_data`: file, position and lengths of each chunk."""
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, tuple[str, int, tuple[int, ...]]] = {}
        for name, entry in self._index.items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets, lengths = torch.Size(chunk["offsets"]), torch.Size(chunk["lengths"])
                chunks.append(ChunkStorageMetadata(offsets, lengths))
                stored[MetadataIndex(name, offsets)] = (chunk["file"], chunk["position"], lengths)
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors, storage_data=stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        PULSE.do("reading")
        for item in plan.items:
            self._read_item(item, planner.resolve_tensor(item))
            PULSE.do("reading")
        PULSE.everybody().wait("load", PULSE.everybody().advance())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, item: ReadItem, target: Tensor) -> None:
        """Reads the rows the box lies in; straight into it where it is made of whole rows."""
        file, position, lengths = self._metadata.storage_data[item.storage_index]
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        dtype = entry.properties.dtype
        first, rows = item.storage_offsets[0], item.lengths[0]
        position += first * prod(lengths[1:]) * dtype.itemsize
        whole_rows = tuple(item.lengths[1:]) == tuple(lengths[1:])
        straight = whole_rows and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        values = target if straight else torch.empty((rows, *lengths[1:]), dtype=dtype)
        self._folder.files.read_into((self._folder / file).path, position, as_bytes(values))
        if straight:
            return
        for dimension in range(1, values.ndim):
            values = values.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
        target.copy_(values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
