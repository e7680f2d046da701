"""How a checkpoint lies on disk: raw tensors and JSON, nothing that could run code when opened.

    step-00000120/
      data-00000.bin …     one file per rank that has something to say, tensors one after another
      index.json           for every full tensor its dtype, shape and chunks: offsets, lengths, file, position
      manifest.json        the size and checksum of every other file, and what the checkpoint is of

A rank's state is copied into host memory as it will lie in its file (`Staging`), written into a folder aside and
published by one rename (`Writer`), so a reader never sees a part of it; where folders cannot be renamed the manifest is
written last, and what has none is no checkpoint. `Reader` reads the slices any layout asks for, whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from cuboid.checkpoint.folder import withdraw
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    Damage,
    Digest,
    Manifest,
    Place,
    StoredFile,
    checksum_of_bytes,
    checksum_of_file,
    data_file,
    kind_here,
    kind_of,
    new_digest,
    spell,
)
from cuboid.checkpoint.shards import ShardedTensor, TensorSlice
from cuboid.checkpoint.state import GENERATOR
from cuboid.checkpoint.verify import MISMATCH, check_file, check_index
from cuboid.kernels.precision import join_halves
from cuboid.telemetry.heartbeat import HEARTBEAT

# Host memory that holds this rank's part of a checkpoint as it will lie in its file, filled anew at every save.
#
# Copying into it is all that a training waits for: what is written is never what the optimizer changes.


ALIGNMENT = 64


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    content: Any = tensor.detach().flatten().view(torch.uint8).numpy()
    return memoryview(content)


def staged_bytes(state: dict[str, ShardedTensor]) -> int:
    return sum(
        _aligned(tensor_slice.size * held.dtype.itemsize) for held in state.values() for tensor_slice, _ in held.slices
    )


class Staging:
    def __init__(self, state: dict[str, ShardedTensor], device: torch.device, memory: Tensor | None = None) -> None:
        """`memory`: as many bytes as the state needs; default: its own."""
        self._on_gpu = device.type == "cuda"
        if memory is None:
            # Zeroed here, so that the first save need not wait for the system to find the pages.
            memory = torch.zeros(staged_bytes(state), dtype=torch.uint8, pin_memory=self._on_gpu)
        self._memory = memory
        self.content = as_bytes(self._memory)
        self.state = self._lay_out(state)
        # What is offloaded lies in CPU memory already, where copying keeps the host busy: a thread of its own.
        self._thread = ThreadPoolExecutor(1) if self._on_gpu else None
        self._copying: Future[None] | None = None
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._copied: Any = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]

    def _lay_out(self, state: dict[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        laid_out: dict[str, ShardedTensor] = {}
        position = 0
        for name, held in state.items():
            slices = []
            for tensor_slice, values in held.slices:
                size = tensor_slice.size * held.dtype.itemsize
                here = self._memory[position : position + size].view(held.dtype).view(values.shape)
                slices.append((tensor_slice, here))
                position += _aligned(size)
            laid_out[name] = ShardedTensor(held.full_shape, held.dtype, tuple(slices))
        return laid_out

    def position_of(self, values: Tensor) -> int:
        """Where a staged tensor lies in the file."""
        return values.data_ptr() - self._memory.data_ptr()

    def fill(self, state: dict[str, ShardedTensor]) -> None:
        """Copy, or on a GPU begin to copy: `wait` before anything of it changes."""
        if self._stream is None:
            self._copy(state)
            return
        assert self._thread is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        away = {name: held for name, held in state.items() if not any(values.is_cuda for _, values in held.slices)}
        with torch.cuda.stream(self._stream):
            self._copy({name: held for name, held in state.items() if name not in away})
            self._copied.record()
        self._copying = self._thread.submit(self._copy_on_stream, away)

    def _copy_on_stream(self, state: dict[str, ShardedTensor]) -> None:
        with torch.cuda.stream(self._stream):
            self._copy(state)

    def _copy(self, state: dict[str, ShardedTensor]) -> None:
        for name, held in state.items():
            for number, ((_, here), (_, values)) in enumerate(zip(self.state[name].slices, held.slices, strict=True)):
                whole = join_halves(held.near[number].to(values.device), values) if held.near else values
                here.copy_(whole, non_blocking=values.is_cuda)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        if self._copying is not None:
            self._copying.result()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


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
    """The slice inside the chunk."""
    target: Tensor
    """What it fills."""


class Reader:
    def __init__(
        self, folder: Place, index: dict[str, Any] | None = None, to_check: Mapping[str, StoredFile] | None = None
    ) -> None:
        """`index`: of this folder, checked already. `to_check`: files to compare with their checksums by the way; what
        is wrong is then in `damage`, which is to be looked at."""
        self._folder = locate(folder)
        self._to_check = to_check
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

    def fill(self, state: Mapping[str, ShardedTensor]) -> None:
        """Every slice of these tensors, from all chunks that hold something of it."""
        self.require({name: held.full_shape for name, held in state.items()})
        files: dict[str, list[Wanted]] = {name: [] for name in self._to_check or ()}
        for name, held in state.items():
            for chunk in self.index[name]["chunks"]:
                for tensor_slice, values in held.slices:
                    if wanted := _overlap(tensor_slice, values, chunk, DTYPES[self.index[name]["dtype"]]):
                        files.setdefault(chunk["file"], []).append(wanted)
        for file, of_file in files.items():
            try:
                self._read_file(file, sorted(of_file, key=lambda each: each.start))
            except (Damage, OSError) as error:
                if self._to_check is None:
                    raise
                # A disk that fails is damage too: an older checkpoint may lie on good ground.
                unread = Damage(self._folder, file, f"cannot be read ({error})")
                self.damage = error if isinstance(error, Damage) else unread

    def _read_file(self, file: str, wanted: list[Wanted]) -> None:
        """A file to check is read once where all of it is wanted, as where the layout is the one that wrote it."""
        HEARTBEAT.do("reading")
        expected, digest, reached = (self._to_check or {}).get(file), None, 0
        if expected is not None:
            if self._all_of(wanted, expected.bytes):
                digest = new_digest(kind_of(expected.checksum))
                self._folder.files.prefetch((self._folder / file).path)
            else:
                check_file(self._folder, file, expected)
        for each in wanted:
            if digest is not None:
                self._read_bytes(file, reached, memoryview(bytearray(each.start - reached)), digest)
            reached = each.start + self._read_slice(file, each, digest)
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

    def _read_slice(self, file: str, wanted: Wanted, digest: Digest | None) -> int:
        """Reads the rows the slice lies in; straight into it where it is made of whole rows. Returns their bytes."""
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


def _overlap(tensor_slice: TensorSlice, values: Tensor, chunk: Mapping[str, Any], dtype: torch.dtype) -> Wanted | None:
    """What a slice of this rank and a stored chunk have in common; `values`: those of the slice. None: nothing."""
    pairs = list(zip(tensor_slice.offsets, chunk["offsets"], strict=True))
    begins = [max(pair) for pair in pairs]
    ends = [
        min(own + length, stored + stored_length)
        for (own, stored), length, stored_length in zip(pairs, tensor_slice.lengths, chunk["lengths"], strict=True)
    ]
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    if min(lengths) <= 0:
        return None
    values = values.detach()
    for dimension, length in enumerate(lengths):
        values = values.narrow(dimension, begins[dimension] - tensor_slice.offsets[dimension], length)
    offsets = tuple(begin - stored for begin, (_, stored) in zip(begins, pairs, strict=True))
    return Wanted(chunk["position"], tuple(chunk["lengths"]), dtype, offsets, lengths, values)


# The tensors of a checkpoint consolidated in one process, to be looked at.


def whole_tensors(checkpoint: Place) -> dict[str, Tensor]:
    """By the names of the index: `parameter/…`, and of AdamW `exp_avg/…`, `exp_avg_sq/…`."""
    reader = Reader(checkpoint)
    state: dict[str, ShardedTensor] = {}
    for name, entry in reader.index.items():
        if name.partition("/")[0] == GENERATOR:  # random generators are a rank's, not the model's
            continue
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        whole = TensorSlice((0,) * len(shape), shape, 0)
        state[name] = ShardedTensor(shape, dtype, ((whole, torch.full(shape, float("nan"), dtype=dtype)),))
    reader.fill(state)
    return {name: held.slices[0][1] for name, held in state.items()}


CHUNK = 16 << 20
"""Bytes written at a time: large, because between two of them a thread may wait for the interpreter."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

IndexPart = dict[str, tuple[str, str]]
"""Name -> the beginning of its entry in the index, and this rank's chunks: JSON that needs only to be concatenated."""


def index_part(staging: Staging, rank: int) -> IndexPart:
    """What the index says of this rank's file, the same at every save."""
    part: IndexPart = {}
    for name, held in staging.state.items():
        chunks = [
            {
                "offsets": list(tensor_slice.offsets),
                "lengths": list(tensor_slice.lengths),
                "file": data_file(rank),
                "position": staging.position_of(values),
                "bytes": values.nbytes,
            }
            for tensor_slice, values in held.slices
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

    def open(self, in_a_run: bool = False) -> None:
        """By rank 0, before anybody writes. `in_a_run`: the run has made the folder above that of its checkpoints; if
        that was removed, or unmounted, nothing is made in its place."""
        self._aside.remove(first=MANIFEST)
        if in_a_run:
            self._aside.parent.make_inner_folder()
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
