"""What a node holds of a state in memory: mapped files (copying into them is writing them), and their description."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor

from cuboid.checkpoint.folder import checkpoint_path, step_of
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    PLAIN,
    Manifest,
    StoredFile,
    checksum_of_bytes,
    data_file,
    kind_of,
)
from cuboid.checkpoint.memory.nodes import parts_kept, peers, ranks_by_node
from cuboid.checkpoint.save import GivenUp
from cuboid.checkpoint.shards import Index, ShardedTensor
from cuboid.checkpoint.storage import Staging, index_part, staged_bytes, whole_index
from cuboid.parallel.coordination import Coordination

# One generation in flight in a node's memory: files that are mapped, so that copying into them is writing them.


CHUNK = 64 << 20


def map_new_file(place: Location, size: int, device: torch.device) -> Tensor:
    """The bytes of a new file. All of its memory is taken now: what runs out later would end the process."""
    handle = os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.ftruncate(handle, size)
    finally:
        os.close(handle)
    mapped = torch.from_file(place.path, shared=True, size=size, dtype=torch.uint8)
    mapped.zero_()  # so that the first save need not wait for its pages to be found
    if device.type == "cuda":
        _pin(mapped, device)
    return mapped


def _pin(mapped: Tensor, device: torch.device) -> None:
    """So that the GPU copies into it by itself. Only pages in memory can be pinned: those of a folder on a disk cannot,
    and are copied into by the CPU."""
    library: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if library.cudaHostRegister(mapped.data_ptr(), mapped.numel(), 1) != library.cudaError.success:
        with suppress(RuntimeError):  # CUDA keeps the error and raises it at the next kernel launch: here
            torch.zeros(1, device=device)


def chunks(memory: Tensor) -> list[Tensor]:
    """What is sent at a time."""
    return [memory[start : start + CHUNK] for start in range(0, memory.numel(), CHUNK)]


class Slot:
    """This rank's part of a generation, and the copies it keeps for others. While it is filled its folder is no
    checkpoint; published, it is that of a step; then its files are filled again, by everybody who has them mapped."""

    def __init__(
        self,
        folder: Location,
        number: int,
        rank: int,
        state: dict[str, ShardedTensor],
        copies: Mapping[int, int],
        device: torch.device,
    ) -> None:
        """`copies`: sizes of the parts of other ranks."""
        self._folder, self._number = folder, number
        self._published: Location | None = None
        self.aside.make_folder()
        own = map_new_file(self.aside / data_file(rank), staged_bytes(state), device)
        self.own = own
        self.staging = Staging(state, device, own)
        host = torch.device("cpu")
        self.copies = {owner: map_new_file(self.aside / data_file(owner), size, host) for owner, size in copies.items()}

    @property
    def aside(self) -> Location:
        return self._folder / f".slot-{self._number}"

    @property
    def step(self) -> int | None:
        """As it is published by this rank."""
        return None if self._published is None else step_of(self._published)

    def publish(self, step: int, index: bytes, manifest: bytes) -> None:
        """By one rank of the node, when all have filled it."""
        self.withdraw()
        (self.aside / INDEX).write_durably(index)
        (self.aside / MANIFEST).write_durably(manifest)
        target = checkpoint_path(self._folder, step)
        target.remove()  # of an earlier attempt
        self.aside.rename(target)
        self._published = target

    def withdraw(self) -> None:
        """By the rank that published it, before anybody fills it again."""
        if self._published is not None:
            self._published.rename(self.aside)
            self._published = None


# What a node writes down of a state: the files that it has, and where each chunk lies in them. No node writes down all
# of it, so what a save costs a node does not grow with the nodes; rank 0 merges it when a run starts again.


Told = TypeVar("Told")


def tell_leaders(nodes: Sequence[str], told: Mapping[str, Told], group: Coordination) -> Told | None:
    """What rank 0 has for each node, to the rank that leads it; None to others. `nodes`: that of each rank, on rank
    0."""
    leaders = {ranks[0] for ranks in ranks_by_node(nodes).values()}
    return group.scatter([told.get(node) if rank in leaders else None for rank, node in enumerate(nodes)])


def assign_copies(sizes: Sequence[int], nodes: Sequence[str], group: Coordination) -> tuple[int | None, dict[int, int]]:
    """The rank that keeps a copy of this one's part; the ranks whose parts are copied here, and their sizes. `sizes`:
    of the part of each rank, on rank 0."""
    chosen, copies = peers(nodes), [dict[int, int]() for _ in sizes]
    for owner, checkpointer in enumerate(chosen):
        if checkpointer is not None:
            copies[checkpointer][owner] = sizes[owner]
    return group.scatter(list(zip(chosen, copies, strict=True)))


def node_index(staging: Staging, nodes: Sequence[str], group: Coordination) -> bytes:
    """The index of the files that a node keeps, for who leads it: it is the same at every save. Every rank calls
    this."""
    parts = group.gather(index_part(staging, group.rank))
    kept = parts_kept(nodes).items()
    own = tell_leaders(nodes, {node: whole_index(parts[rank] for rank in ranks) for node, ranks in kept}, group)
    return own or b""


def node_manifest(
    own: StoredFile,
    received: Mapping[int, str],
    manifest: Manifest,
    index: bytes,
    nodes: Sequence[str],
    group: Coordination,
) -> Manifest | None:
    """A node's manifest, for who leads it, if all copies are as they were sent; else `GivenUp` on all ranks.
    `received`: checksums of this rank's copies, by owner. `index`: of this node."""
    told = group.gather((own, received))
    wrong = (
        f"the part of rank {owner} did not reach rank {checkpointer} as it was sent"
        for checkpointer, (_, copies) in enumerate(told)
        for owner, checksum in copies.items()
        if checksum != told[owner][0].checksum
    )
    if problem := group.broadcast(next(wrong, "")):
        raise GivenUp(problem)
    kept = parts_kept(nodes).items()
    files = tell_leaders(nodes, {n: {data_file(rank): told[rank][0] for rank in ranks} for n, ranks in kept}, group)
    # To the microsecond: it tells this attempt at the step from any other.
    manifest = replace(manifest, written=datetime.now(UTC).isoformat())
    head = tell_leaders(nodes, dict.fromkeys(nodes, manifest), group)
    return None if head is None or files is None else with_index(head, files, index, kind_of(own.checksum))


def with_index(manifest: Manifest, files: Mapping[str, StoredFile], index: bytes, kind: str) -> Manifest:
    """A node's manifest."""
    return replace(manifest, files={**files, INDEX: StoredFile(len(index), checksum_of_bytes(index, kind))})


def digest_of(manifest: Manifest) -> str:
    """Equal on all nodes that have something of the same state."""
    return sha256(replace(manifest, files={}).render(PLAIN)).hexdigest()


@dataclass(frozen=True)
class NodeRecord:
    """What a node says of its part of a state."""

    manifest: Manifest
    index: bytes
    """Empty where it is damaged: another node says the same."""

    @property
    def entries(self) -> dict[str, Index]:
        """What the index says of each file."""
        result: dict[str, Index] = {}
        for name, entry in json.loads(self.index or b"{}").items():
            for chunk in entry["chunks"]:
                part = result.setdefault(chunk["file"], {})
                part.setdefault(name, {**entry, "chunks": []})["chunks"].append(chunk)
        return result

    def write(self, folder: Location) -> None:
        (folder / INDEX).write_durably(self.index)
        (folder / MANIFEST).write_durably(self.manifest.render(kind_of(self.manifest.files[INDEX].checksum)))


def join_entries(parts: Iterable[Index]) -> Index:
    """The index of several files."""
    result: Index = {}
    for part in parts:
        for name, entry in part.items():
            result.setdefault(name, {**entry, "chunks": []})["chunks"].extend(entry["chunks"])
    return result
