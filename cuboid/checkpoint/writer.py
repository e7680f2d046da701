"""How a checkpoint lies on disk: raw tensors and JSON, nothing that could run code when opened.

    step-00000120/
      data-00000.bin …     one file per rank that has something to say, tensors one after another
      index.json           for every full tensor its dtype, shape and chunks: offsets, lengths, file, position
      manifest.json        the size and checksum of every other file, and what the checkpoint is of

Everything is written into a folder aside and published by one rename, so a reader never sees a part of it; where
folders cannot be renamed the manifest is written last, and what has none is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from cuboid.checkpoint.checksum import checksum_of_bytes, checksum_of_file, kind_here, new_digest, spell
from cuboid.checkpoint.folder import withdraw
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest, StoredFile, data_file
from cuboid.checkpoint.reader import DTYPES
from cuboid.checkpoint.staging import Staging
from cuboid.telemetry.heartbeat import HEARTBEAT

CHUNK = 16 << 20
"""Bytes written at a time: large, because between two of them a thread may wait for the interpreter."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

IndexPart = dict[str, tuple[str, str]]
"""Name -> the beginning of its entry in the index, and this rank's chunks: JSON that needs only to be put together."""


def index_part(staging: Staging, rank: int) -> IndexPart:
    """What the index says of this rank's file, the same at every save."""
    part: IndexPart = {}
    for name, held in staging.state.items():
        chunks = [
            {
                "offsets": list(box.offsets),
                "lengths": list(box.lengths),
                "file": data_file(rank),
                "position": staging.position_of(values),
                "bytes": values.nbytes,
            }
            for box, values in held.boxes
        ]
        if chunks:
            head = {"dtype": NAMES[held.dtype], "shape": list(held.full_shape)}
            part[name] = (json.dumps(head)[:-1], json.dumps(chunks)[1:-1])
    return part


def whole_index(parts: Iterable[IndexPart]) -> bytes:
    """The index, of what all ranks say."""
    heads: dict[str, str] = {}
    chunks: dict[str, list[str]] = {}
    for part in parts:
        for name, (head, own) in part.items():
            heads.setdefault(name, head)
            chunks.setdefault(name, []).append(own)
    entries = (f'{json.dumps(name)}: {head}, "chunks": [{", ".join(chunks[name])}]}}' for name, head in heads.items())
    return f"{{{', '.join(entries)}}}".encode()


class Writer:
    """Every rank writes one file; rank 0 then writes index and manifest and publishes."""

    def __init__(self, target: Location, rank: int, manifest: Manifest, staging: Staging) -> None:
        self._target = target
        self._aside = target.parent / f".{target.name}.writing" if target.files.renames else target
        self._rank = rank
        self._manifest = manifest
        self._staging = staging

    def open(self) -> None:
        """By rank 0, before anybody writes."""
        self._aside.remove(first=MANIFEST)
        self._aside.make_folder()

    def write(self) -> StoredFile | None:
        """This rank's file; None if it has nothing to say."""
        file = self._write_file(self._aside / data_file(self._rank)) if self._staging.content.nbytes else None
        HEARTBEAT.everybody("checkpoint").reach(self._manifest.step)
        return file

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

    def publish(self, index: bytes, files: dict[str, StoredFile]) -> None:
        """By rank 0, when all have written theirs."""
        files = {**files, INDEX: StoredFile(len(index), checksum_of_bytes(index))}
        (self._aside / INDEX).write_durably(index)
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
