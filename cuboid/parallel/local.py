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
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

DEADLINE = 600.0
"""Seconds to wait for the other ranks."""


def machine_identity() -> str:
    """Equal for two processes that can share memory and sockets: same kernel, same network and mount namespaces."""
    if sys.platform != "linux":
        return uuid4().hex  # abstract sockets are Linux's own
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.readlink('/proc/self/ns/mnt')}"


class LocalExchange:
    """One group's slots, and a stream to each other rank."""

    def __init__(self, handle: dist.ProcessGroup, index: int, size: int, slot_bytes: int, name: str) -> None:
        self._index, self._size = index, size
        self.slot_bytes = slot_bytes
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        path = os.path.join(folder, name)
        total = size * 2 * slot_bytes
        if index == 0:
            with open(path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, total)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}/{index}")
            listener.listen(size)
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

    def exchange(self, tensor: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Show `tensor` to all ranks; `read` gets all of theirs, (ranks, elements), and returns a copy of what it
        needs."""
        self._turn += 1
        slots = torch.frombuffer(self._map, dtype=tensor.dtype).view(self._size, 2, -1)
        slots = slots[:, self._turn & 1, : tensor.numel()]
        slots[self._index].copy_(tensor.reshape(-1))
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
        return read(slots)

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()


def connect(handle: dist.ProcessGroup, index: int, size: int, slot_bytes: int) -> LocalExchange | None:
    """An exchange for the group if all of it is on this machine; every rank of the group calls this."""
    identities: list[Any] = [None] * size
    dist.all_gather_object(identities, (machine_identity(), uuid4().hex), group=handle)
    if len({machine for machine, _ in identities}) > 1:
        return None
    aligned = -(-slot_bytes // 64) * 64
    return LocalExchange(handle, index, size, aligned, f"cuboid-{identities[0][1]}")
