"""One generation in flight in a node's memory: files that are mapped, so that copying into them is writing them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cuboid.checkpoint.folder import checkpoint_path, step_of
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, MANIFEST, data_file
from cuboid.checkpoint.scattered import Scattered
from cuboid.checkpoint.staging import Staging, staged_bytes

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
    if device.type == "cuda":  # so that the GPU copies into it by itself
        library: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        library.cudaHostRegister(mapped.data_ptr(), size, 1)
    return mapped


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
        state: dict[str, Scattered],
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
