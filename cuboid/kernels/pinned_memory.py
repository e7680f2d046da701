"""CPU memory that a GPU copies from and to while the host does something else."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from math import prod
from typing import Any

import psutil
import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.telemetry.heartbeat import HEARTBEAT

PAGE = 4096
GIB = 2**30


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """From host memory to a GPU through memory it can read by itself: nobody waits."""
    pins = device.type == "cuda" and x.device.type == "cpu"
    return x.pin_memory().to(device, non_blocking=True) if pins else x.to(device)


class HostCopy:
    """Small results on their way from the device. Nothing waits for them until they are read; and then only for what
    the device was given to do before, because the copy starts here."""

    def __init__(self, *values: Tensor, timed: bool = False) -> None:
        """From the current stream. `timed`: `seconds_after` is asked for."""
        self._values = values
        self._arrival: torch.cuda.Event | None = None
        if values[0].is_cuda:
            self._values = tuple(torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in values)
            for host, value in zip(self._values, values, strict=True):
                host.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event(enable_timing=timed)
            self._arrival.record()

    def read(self) -> tuple[Tensor, ...]:
        if self._arrival is not None:
            HEARTBEAT.wait("device")
            self._arrival.synchronize()
            HEARTBEAT.end_wait()
        return self._values

    def seconds_after(self, before: HostCopy) -> float | None:
        """Between the arrivals of two copies that have been read, by the device's own clock; None where it has none."""
        if before._arrival is None or self._arrival is None:
            return None
        return float(before._arrival.elapsed_time(self._arrival)) / 1000


class PinnedMemory:
    """Zeros from which tensors are cut one after the other.

    torch's own pinned memory comes in powers of two, of which a model's moments would waste up to half."""

    def __init__(self, size: int, device: torch.device) -> None:
        free = psutil.virtual_memory().available
        if size > free:
            raise UserError(
                f"layout.offload=true needs {size / GIB:.1f} GiB of CPU memory for a rank and {free / GIB:.1f} "
                "are free; use offload=false, a higher zero, or more ranks"
            )
        self.size = -(-max(size, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child process that wrote here would part this process from the pages the device writes to; and large pages
        # are found sooner. Where the system has no such advice, it has no such cares.
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            with suppress(AttributeError, OSError):
                memory.madvise(getattr(mmap, advice))
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = 0
        if device.type == "cuda":
            _checked(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0))
            weakref.finalize(self, _unregister, self._bytes).atexit = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that nobody else has; they begin a page."""
        start = self._used
        self._used = start + bytes_taken(shape, dtype)
        return self._bytes[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def bytes_taken(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // PAGE) * PAGE


def _unregister(memory: Tensor) -> None:
    torch.cuda.synchronize()
    _checked(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _checked(status: Any) -> None:
    """`status`: torch's own enumeration, which no number equals."""
    torch.cuda.check_error(status)
