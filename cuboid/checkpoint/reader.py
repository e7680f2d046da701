"""Reads the boxes a layout asks for, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.checksum import Digest, kind_of, new_digest, spell
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import INDEX, Damage, Place, StoredFile
from cuboid.checkpoint.scattered import Scattered
from cuboid.checkpoint.staging import ALIGNMENT, as_bytes
from cuboid.checkpoint.verify import MISMATCH, check_file
from cuboid.telemetry.heartbeat import HEARTBEAT

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a chunk."""

    start: int
    """Of the chunk in its file, in bytes."""
    chunk: tuple[int, ...]
    """Its lengths."""
    dtype: torch.dtype
    """As it was written."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    """The box inside the chunk."""
    target: Tensor
    """What it fills."""


class Reader:
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

    def fill(self, state: Mapping[str, Scattered]) -> None:
        """Every box of these tensors, from all chunks that hold something of it."""
        self.require({name: held.full_shape for name, held in state.items()})
        files: dict[str, list[Wanted]] = {name: [] for name in self._share or ()}
        for name, held in state.items():
            for chunk in self.index[name]["chunks"]:
                for box, values in held.boxes:
                    if wanted := _overlap(box, values, chunk, DTYPES[self.index[name]["dtype"]]):
                        files.setdefault(chunk["file"], []).append(wanted)
        for file, of_file in files.items():
            try:
                self._read_file(file, sorted(of_file, key=lambda each: each.start))
            except (Damage, OSError) as error:
                if self._share is None:
                    raise
                # A disk that fails is damage too: an older checkpoint may lie on good ground.
                unread = Damage(self._folder, file, f"cannot be read ({error})")
                self.damage = error if isinstance(error, Damage) else unread

    def _read_file(self, file: str, wanted: list[Wanted]) -> None:
        """A file of the share is read once where all of it is wanted, as where the layout is the one that wrote it."""
        HEARTBEAT.do("reading")
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
            reached = each.start + self._read_box(file, each, digest)
            HEARTBEAT.do("reading")
        if expected is not None and digest is not None:
            self._read_bytes(file, reached, memoryview(bytearray(expected.bytes - reached)), digest)
            if spell(kind_of(expected.checksum), digest) != expected.checksum:
                raise Damage(self._folder, file, MISMATCH)

    def _all_of(self, wanted: list[Wanted], size: int) -> bool:
        """Whether these are chunks, none of them twice, with nothing but what aligns them between."""
        reached = 0
        for each in wanted:
            if not 0 <= each.start - reached < ALIGNMENT or each.lengths != each.chunk:
                return False
            reached = each.start + prod(each.chunk) * each.dtype.itemsize
        return size - reached < ALIGNMENT

    def _read_box(self, file: str, wanted: Wanted, digest: Digest | None) -> int:
        """Reads the rows the box lies in; straight into it where it is made of whole rows. Returns their bytes."""
        chunk, lengths, dtype, target = wanted.chunk, wanted.lengths, wanted.dtype, wanted.target
        position = wanted.start + wanted.offsets[0] * prod(chunk[1:]) * dtype.itemsize
        whole_rows = lengths[1:] == chunk[1:]
        straight = whole_rows and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        values = target if straight else torch.empty((lengths[0], *chunk[1:]), dtype=dtype)
        self._read_bytes(file, position, as_bytes(values), digest)
        count = values.nbytes
        if straight:
            return count
        for dimension in range(1, values.ndim):
            values = values.narrow(dimension, wanted.offsets[dimension], lengths[dimension])
        target.copy_(values)
        return count

    def _read_bytes(self, file: str, position: int, buffer: memoryview, digest: Digest | None) -> None:
        files, path = self._folder.files, (self._folder / file).path
        optimizer_shard = files.read_size if digest is not None else max(1, buffer.nbytes)
        for start in range(0, buffer.nbytes, optimizer_shard):
            part = buffer[start : start + optimizer_shard]
            files.read_into(path, position + start, part)
            if digest is not None:
                digest.update(part)


def _overlap(box: Box, values: Tensor, chunk: Mapping[str, Any], dtype: torch.dtype) -> Wanted | None:
    """What a box of this rank and a stored chunk have in common; `values`: those of the box. None: nothing."""
    pairs = list(zip(box.offsets, chunk["offsets"], strict=True))
    begins = [max(pair) for pair in pairs]
    ends = [
        min(own + length, stored + stored_length)
        for (own, stored), length, stored_length in zip(pairs, box.lengths, chunk["lengths"], strict=True)
    ]
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    if min(lengths) <= 0:
        return None
    values = values.detach()
    for dimension, length in enumerate(lengths):
        values = values.narrow(dimension, begins[dimension] - box.offsets[dimension], length)
    offsets = tuple(begin - stored for begin, (_, stored) in zip(begins, pairs, strict=True))
    return Wanted(chunk["position"], tuple(chunk["lengths"]), dtype, offsets, lengths, values)
