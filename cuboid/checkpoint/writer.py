"""How a checkpoint lies on disk: raw tensors and JSON, nothing that could run code when opened.

    step-00000120/
      data-00000.bin …     one file per rank that has something to say, tensors one after another
      index.json           for every full tensor its dtype, shape and chunks: offsets, lengths, file, position
      manifest.json        the size and checksum of every other file, and what the checkpoint is of

Everything is written into a folder aside and published by one rename, so a reader never sees a part of it; where
folders cannot be renamed the manifest is written last, and what has none is no checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cuboid.checkpoint.checksum import checksum_of_bytes, checksum_of_file, kind_here, new_digest, spell
from cuboid.checkpoint.folder import withdraw
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest, StoredFile
from cuboid.checkpoint.reader import DTYPES
from cuboid.checkpoint.staging import Staging
from cuboid.resilience.pulse import PULSE

CHUNK = 16 << 20
"""Bytes written at a time: large, because between two of them a thread may wait for the interpreter."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Where a chunk lies."""

    name: str
    position: int
    bytes: int
    file: StoredFile


class Writer(StorageWriter):
    """Every rank writes one file; the coordinator then writes index and manifest and publishes."""

    def __init__(self, target: Location, rank: int, manifest: Manifest, staging: Staging) -> None:
        self._target = target
        self._aside = target.parent / f".{target.name}.writing" if target.files.renames else target
        self._rank = rank
        self._manifest = manifest
        self._staging = staging

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if is_coordinator:
            self._aside.remove(first=MANIFEST)
            self._aside.make_folder()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"data-{self._rank:05d}.bin"
            file = self._write_file(self._aside / name)
            for item in plan.items:
                values: Any = planner.resolve_data(item)
                stored = Stored(name, self._staging.position_of(values), values.nbytes, file)
                results.append(WriteResult(item.index, values.nbytes, stored))
        PULSE.everybody("checkpoint").reach(self._manifest.step)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, place: Location) -> StoredFile:
        content, files = self._staging.content, place.files
        kind = kind_here()
        digest = new_digest(kind)
        handle = files.open(place.path)
        try:
            for start in range(0, content.nbytes, CHUNK):
                part = content[start : start + CHUNK]
                digest.update(part)
                files.write(handle, part)
            files.fsync(handle)
        finally:
            files.close(handle)
        written = StoredFile(content.nbytes, spell(kind, digest))
        # A store without rename is reached over a network, which checks what it carries; here nobody else does.
        if files.renames and checksum_of_file(place, written.bytes, kind) != written.checksum:
            raise OSError(f"{place} does not read back as it was written")
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for rank in results for result in rank}
        index: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                place: Stored = stored[MetadataIndex(name, chunk.offsets)]
                where = {"file": place.name, "position": place.position, "bytes": place.bytes}
                chunks.append({"offsets": list(chunk.offsets), "lengths": list(chunk.sizes), **where})
            index[name] = {"dtype": NAMES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
        content = json.dumps(index).encode()
        files = {place.name: place.file for place in stored.values()}
        files[INDEX] = StoredFile(len(content), checksum_of_bytes(content))
        (self._aside / INDEX).write_durably(content)
        for name, file in files.items():
            self._require_whole(name, file)
        manifest = replace(self._manifest, files=dict(sorted(files.items())))
        (self._aside / MANIFEST).write_durably(manifest.render())
        if self._aside != self._target:
            self._publish()

    def _require_whole(self, name: str, file: StoredFile) -> None:
        """Before anything is published: the folder may be one that not all machines share."""
        size = (self._aside / name).size
        if size != file.bytes:
            held = "is not there" if size is None else f"has {size} of {file.bytes} bytes"
            raise OSError(f"{self._aside / name} {held}, as rank 0 sees it")

    def _publish(self) -> None:
        if self._target.exists:  # a damaged one of the same step, since which the run went back
            withdraw(self._target)
        self._aside.files.fsync_folder(self._aside.path)
        self._aside.rename(self._target)
        self._target.files.fsync_folder(self._target.parent.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
