"""Reads the boxes a layout asks for, whoever wrote them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
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

from cuboid.checkpoint.checksum import Digest, kind_of, new_digest, spell
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import INDEX, Damage, Place, StoredFile
from cuboid.checkpoint.staging import ALIGNMENT, as_bytes
from cuboid.checkpoint.verify import MISMATCH, check_file
from cuboid.resilience.pulse import PULSE

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class Wanted:
    """A chunk of which something is wanted: where it starts in its file, its lengths, and what."""

    start: int
    lengths: tuple[int, ...]
    item: ReadItem


class Reader(StorageReader):
    def __init__(
        self, folder: Place, index: dict[str, Any] | None = None, share: Mapping[str, StoredFile] | None = None
    ) -> None:
        """`index`: of this folder, checked already. `share`: files to compare with their checksums by the way; what is
        wrong is then in `damage`, which is to be looked at."""
        self._folder = locate(folder)
        self._share = share
        self.damage: Damage | None = None
        self.index = check_index(self._folder) if index is None else index
        self.names = self.index.keys()

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """A `Damage` if it is of another model, whatever its manifest says."""
        for name, shape in shapes.items():
            held = self.index.get(name, {}).get("shape")
            if held != list(shape):
                reason = "lacks" if held is None else f"has {'×'.join(map(str, held))} elements in"
                raise Damage(self._folder, INDEX, f"{reason} {name}, which needs {'×'.join(map(str, shape))}")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """`storage_data`: file, position and lengths of each chunk."""
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, tuple[str, int, tuple[int, ...]]] = {}
        for name, entry in self.index.items():
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
        items: dict[str, list[Wanted]] = {name: [] for name in self._share or ()}
        for item in plan.items:
            file, start, lengths = self._metadata.storage_data[item.storage_index]
            items.setdefault(file, []).append(Wanted(start, lengths, item))
        for file, wanted in items.items():
            try:
                self._read_file(file, sorted(wanted, key=lambda each: each.start), planner)
            except (Damage, OSError) as error:
                if self._share is None:
                    raise
                # A disk that fails is damage too: an older checkpoint may lie on good ground.
                unread = Damage(self._folder, file, f"cannot be read ({error})")
                self.damage = error if isinstance(error, Damage) else unread
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, file: str, wanted: list[Wanted], planner: LoadPlanner) -> None:
        """A file of the share is read once where all of it is wanted, as where the layout is the one that wrote it."""
        PULSE.do("reading")
        expected, digest, reached = (self._share or {}).get(file), None, 0
        if expected is not None:
            if self._all_of(wanted, expected.bytes):
                digest = new_digest(kind_of(expected.checksum))
                self._folder.files.prefetch((self._folder / file).path)
            else:
                check_file(self._folder, file, expected)
        for each in wanted:
            if digest is not None:
                self._read_bytes(file, reached, memoryview(bytearray(each.start - reached)), digest)
            reached = each.start + self._read_item(file, each, planner.resolve_tensor(each.item), digest)
            PULSE.do("reading")
        if expected is not None and digest is not None:
            self._read_bytes(file, reached, memoryview(bytearray(expected.bytes - reached)), digest)
            if spell(kind_of(expected.checksum), digest) != expected.checksum:
                raise Damage(self._folder, file, MISMATCH)

    def _all_of(self, wanted: list[Wanted], size: int) -> bool:
        """Whether these are chunks, none of them twice, with nothing but what aligns them between."""
        reached = 0
        for each in wanted:
            if not 0 <= each.start - reached < ALIGNMENT or tuple(each.item.lengths) != tuple(each.lengths):
                return False
            reached = each.start + prod(each.lengths) * self._dtype(each.item).itemsize
        return size - reached < ALIGNMENT

    def _dtype(self, item: ReadItem) -> torch.dtype:
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def _read_item(self, file: str, wanted: Wanted, target: Tensor, digest: Digest | None) -> int:
        """Reads the rows the box lies in; straight into it where it is made of whole rows. Returns their bytes."""
        item, lengths, dtype = wanted.item, wanted.lengths, self._dtype(wanted.item)
        first, rows = item.storage_offsets[0], item.lengths[0]
        position = wanted.start + first * prod(lengths[1:]) * dtype.itemsize
        whole_rows = tuple(item.lengths[1:]) == tuple(lengths[1:])
        straight = whole_rows and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        values = target if straight else torch.empty((rows, *lengths[1:]), dtype=dtype)
        self._read_bytes(file, position, as_bytes(values), digest)
        count = values.nbytes
        if straight:
            return count
        for dimension in range(1, values.ndim):
            values = values.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
        target.copy_(values)
        return count

    def _read_bytes(self, file: str, position: int, buffer: memoryview, digest: Digest | None) -> None:
        files, path = self._folder.files, (self._folder / file).path
        piece = files.read_size if digest is not None else max(1, buffer.nbytes)
        for start in range(0, buffer.nbytes, piece):
            part = buffer[start : start + piece]
            files.read_into(path, position + start, part)
            if digest is not None:
                digest.update(part)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
