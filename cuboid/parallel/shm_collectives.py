"""Collectives between processes of one machine through shared memory, for tensors on the CPU.

Gloo takes every message through TCP and three threads; where more ranks than cores share a machine, the switches
between them cost more than the work. Here each rank writes into its own slot of a shared file, tells the others with
one byte on a socket, and reads theirs: one copy, one hop. The byte also orders memory: what was written before it was
sent is seen after it was received.

Two slots per rank are enough: a rank that signals collective n has finished reading collective n - 1."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.kernels.precision import wide
from cuboid.telemetry.shared_memory import MEMORY, prefix_of

DEADLINE = 600.0
"""Seconds to wait for the other ranks."""


SLOT_BYTES = 4 << 20
"""Longer messages go in chunks of this size."""
SMALL = 32 << 10
"""Up to this many bytes every rank may as well combine all parts itself."""


def sum_rows(rows: Tensor) -> Tensor:
    """In rank order, and in float32 or better, so that every rank gets the same bits."""
    return rows.sum(0, dtype=wide(rows.dtype)).to(rows.dtype)


def machine_identity() -> str:
    """Equal for two processes that can share memory and sockets: same kernel, same network and mount namespaces."""
    if sys.platform != "linux":
        return uuid4().hex  # abstract sockets are Linux's own
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.readlink('/proc/self/ns/mnt')}"


class SharedMemoryGroup:
    """One group's slots, and a stream to each other rank."""

    def __init__(
        self, handle: dist.ProcessGroup, index: int, size: int, slot_bytes: int, folder: str, name: str
    ) -> None:
        """Every rank of the group makes its own; the file of all slots lies in `folder` under `name`."""
        self._index, self._size = index, size
        self.slot_bytes = slot_bytes
        """A multiple of eight bytes per rank, so that a slot divides into any dtype and any rank's part."""
        path, total = os.path.join(folder, name), size * 2 * slot_bytes
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}/{index}")
            listener.listen(size)
            listener.settimeout(DEADLINE)
            dist.barrier(group=handle)
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), total)
            self._peers = self._meet(listener, name)
        dist.barrier(group=handle)
        if index == 0:
            os.unlink(path)  # the mappings keep it alive, and nothing is left behind whatever happens
        self._turn = 0

    def _meet(self, listener: socket.socket, name: str) -> dict[int, socket.socket]:
        """Connect to the ranks below, accept those above."""
        peers: dict[int, socket.socket] = {}
        for peer in range(self._index):
            peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peers[peer].connect(f"\0{name}/{peer}")
            peers[peer].sendall(self._index.to_bytes(4, "little"))
        for _ in range(self._index + 1, self._size):
            connection, _ = listener.accept()
            peers[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
        for connection in peers.values():
            connection.settimeout(DEADLINE)
        return peers

    def all_show(self, tensor: Tensor) -> Tensor:
        """Show a tensor of at most `slot_bytes` to all ranks; returns a view of all of theirs, (ranks, elements),
        that holds until this rank's next collective but one."""
        # Two slots a rank in alternation: a rank may write the next while a slower one still reads the last.
        self._turn += 1
        slots = torch.frombuffer(self._map, dtype=tensor.dtype).view(self._size, 2, -1)
        slots = slots[:, self._turn & 1, : tensor.numel()]
        slots[self._index].view(tensor.shape).copy_(tensor)
        try:
            for connection in self._peers.values():
                connection.send(b"x")
            for connection in self._peers.values():
                if not connection.recv(1):
                    raise ConnectionResetError
        except TimeoutError:
            raise RuntimeError(f"a rank of the group did not reach a collective in {DEADLINE:.0f} s") from None
        except (BrokenPipeError, ConnectionResetError):
            raise RuntimeError("a rank of the group has ended") from None
        return slots

    def all_gather(self, part: Tensor, into: Tensor) -> Tensor:
        rows, flat = into.view(self._size, -1), part.reshape(-1)
        for chunk in self._chunks(flat.numel(), part.element_size()):
            rows[:, chunk].copy_(self.all_show(flat[chunk]))
        return into

    def reduce_scatter(self, x: Tensor, into: Tensor) -> Tensor:
        rows, flat = x.reshape(self._size, -1), into.view(-1)
        for chunk in self._chunks(flat.numel(), x.element_size() * self._size):
            shown = self.all_show(rows[:, chunk]).unflatten(1, (self._size, -1))
            flat[chunk].copy_(sum_rows(shown[:, self._index]))
        return into

    def uneven_all_gather(self, part: Tensor, into: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of flat parts; shorter ones are filled up as they are shown."""
        rows = into.split(list(sizes))
        shown = torch.nn.functional.pad(part, (0, max(sizes) - len(part)))
        for chunk in self._chunks(max(sizes), part.element_size()):
            for row, theirs in zip(rows, self.all_show(shown[chunk]), strict=True):
                here = row[chunk]
                here.copy_(theirs[: len(here)])
        return into

    def uneven_reduce_scatter(self, x: Tensor, into: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of a flat tensor, one rank's part after another."""
        for place, row in enumerate(x.split(list(sizes))):
            for chunk in self._chunks(len(row), x.element_size()):
                shown = self.all_show(row[chunk])
                if place == self._index:
                    into[chunk].copy_(sum_rows(shown))
        return into

    def all_to_all(self, x: Tensor, into: Tensor) -> Tensor:
        rows, found = x.reshape(self._size, -1), into.view(self._size, -1)
        for chunk in self._chunks(rows.shape[1], x.element_size() * self._size):
            shown = self.all_show(rows[:, chunk]).unflatten(1, (self._size, -1))
            found[:, chunk].copy_(shown[:, self._index])
        return into

    def shift(self, x: Tensor) -> Tensor:
        """What the rank before shows; the last comes before the first."""
        flat, into = x.reshape(-1), torch.empty_like(x, memory_format=torch.contiguous_format)
        for chunk in self._chunks(flat.numel(), x.element_size()):
            into.view(-1)[chunk].copy_(self.all_show(flat[chunk])[self._index - 1])
        return into

    def distant_shift(self, x: Tensor, distance: int, into: Tensor, most: int) -> Tensor:
        """What the rank `distance` places behind shows, as much as `into` holds; every rank shows `most` numbers."""
        shown = torch.nn.functional.pad(x, (0, most - x.numel()))
        for chunk in self._chunks(most, x.element_size()):
            found = self.all_show(shown[chunk])[(self._index - distance) % self._size]
            part = into[chunk]
            part.copy_(found[: part.numel()])
        return into

    def all_reduce(self, x: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """In place. Small tensors are combined by every rank; of large ones each rank combines its part and shows
        it."""
        flat = x.view(-1)
        for chunk in self._chunks(flat.numel(), x.element_size()):
            shown = self.all_show(flat[chunk])
            if shown[0].nbytes <= SMALL:
                flat[chunk].copy_(combine(shown))
                continue
            # Reduce-scatter and all-gather by hand: each rank adds 1/size of the elements, in the order of ranks on all
            # of them.
            width = -(-shown.shape[1] // self._size)
            own = combine(shown[:, self._index * width : (self._index + 1) * width])
            padded = torch.nn.functional.pad(own, (0, width - own.numel()))
            flat[chunk].copy_(self.all_show(padded).reshape(-1)[: shown.shape[1]])
        return x

    def _chunks(self, elements: int, element_bytes: int) -> Iterator[slice]:
        step = max(1, self.slot_bytes // element_bytes)
        return (slice(start, min(start + step, elements)) for start in range(0, elements, step))

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()


def _reserve(total: int, name: str) -> str | None:
    """The folder in which a file of this size could be made: memory if there is room, else the temporary one."""
    for folder in (MEMORY, tempfile.gettempdir()):
        path = os.path.join(folder, name)
        try:
            with open(path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, total)
            return folder
        except OSError:
            Path(path).unlink(missing_ok=True)
    return None


def connect(handle: dist.ProcessGroup, index: int, size: int, slot_bytes: int = SLOT_BYTES) -> SharedMemoryGroup | None:
    """None where not all of the group is on this machine, or there is no room; every rank calls this."""
    if dist.get_backend(handle) == "fake":  # there are no others
        return None
    slot_bytes = max(1, slot_bytes // (8 * size)) * 8 * size
    name = f"{prefix_of('slots')}{uuid4().hex}"
    folder = _reserve(size * 2 * slot_bytes, name) if index == 0 else None
    known: list[Any] = [None] * size
    dist.all_gather_object(known, (machine_identity(), folder, name), group=handle)
    _, folder, name = known[0]
    if folder is None:
        return None
    if len({machine for machine, _, _ in known}) > 1:
        if index == 0:
            os.unlink(os.path.join(folder, name))
        return None
    return SharedMemoryGroup(handle, index, size, slot_bytes, folder, name)
