"""How a checkpoint lies on disk: raw tensors and JSON, nothing that could run code when opened.

    step-00000120/
      data-00000.bin …     one file per rank that has something to say, tensors one after another
      index.json           for every full tensor its dtype, shape and chunks: offsets, lengths, file, position
      manifest.json        the size and checksum of every other file, and what the checkpoint is of

Everything is written into a folder aside and published by one rename, so a reader never sees a part of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from cuboid.checkpoint.manifest import DTYPES, INDEX, Manifest, check_index, checksum_of, write_durably

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Where a chunk lies."""

    file: str
    position: int
    bytes: int
    checksum: str = ""
    """Of the whole file; known when it is complete."""


def _as_bytes(tensor: Tensor) -> memoryview:
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(content)


class Writer(StorageWriter):
    """Every rank writes one file; the coordinator then writes index and manifest and publishes."""

    def __init__(self, folder: Path, rank: int, manifest: Manifest) -> None:
        self.target = folder
        self.aside = folder.parent / f".{folder.name}.writing"
        self._rank = rank
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if is_coordinator:
            self.aside.mkdir(parents=True, exist_ok=True)
            for left_over in self.aside.iterdir():
                left_over.unlink()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"data-{self._rank:05d}.bin"
        results: list[WriteResult] = []
        digest = hashlib.sha256()
        if plan.items:
            with (self.aside / name).open("wb") as file:
                for item in plan.items:
                    content = _as_bytes(planner.resolve_data(item))  # type: ignore[arg-type]
                    stored = Stored(name, file.tell(), content.nbytes)
                    file.write(content)
                    digest.update(content)
                    results.append(WriteResult(item.index, content.nbytes, stored))
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        checksum = digest.hexdigest()
        future.set_result(
            [replace(result, storage_data=replace(result.storage_data, checksum=checksum)) for result in results]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for rank in results for result in rank}
        index: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                place = stored[MetadataIndex(name, chunk.offsets)]
                where = {"file": place.file, "position": place.position, "bytes": place.bytes}
                chunks.append({"offsets": list(chunk.offsets), "lengths": list(chunk.sizes), **where})
            index[name] = {"dtype": NAMES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
        write_durably(self.aside / INDEX, json.dumps(index).encode())
        files = {place.file: place.checksum for place in stored.values()}
        files[INDEX] = checksum_of(self.aside / INDEX)
        self._manifest.write(self.aside, files)
        replaced = self.target.parent / f".{self.target.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if self.target.exists():  # a damaged one of the same step, since which the run went back
            os.replace(self.target, replaced)
        os.replace(self.aside, self.target)
        _sync_folder(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Reader(StorageReader):
    """Reads the boxes a layout asks for, whoever wrote them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = check_index(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, Stored] = {}
        for name, entry in self._index.items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["lengths"])))
                stored[MetadataIndex(name, offsets)] = Stored(chunk["file"], chunk["position"], chunk["bytes"])
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
        maps: dict[str, Any] = {}
        for item in plan.items:
            place: Stored = self._metadata.storage_data[item.storage_index]
            if place.file not in maps:
                maps[place.file] = numpy.memmap(self._folder / place.file, dtype=numpy.uint8, mode="c")
            entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            content = torch.from_numpy(maps[place.file][place.position : place.position + place.bytes])
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
            values = content.view(entry.properties.dtype).view(chunk.sizes)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dimension, start, length)
            planner.resolve_tensor(item).copy_(values)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
