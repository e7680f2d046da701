"""Host memory that holds this rank's part of a checkpoint as it will lie in its file, filled anew at every save.

Copying into it is all that a training waits for: what is written is never what the optimizer changes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from cuboid.checkpoint.scattered import Scattered
from cuboid.kernels.split_master_weights import join_halves

ALIGNMENT = 64


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    content: Any = tensor.detach().flatten().view(torch.uint8).numpy()
    return memoryview(content)


def staged_bytes(state: dict[str, Scattered]) -> int:
    return sum(_aligned(box.size * held.dtype.itemsize) for held in state.values() for box, _ in held.boxes)


class Staging:
    def __init__(self, state: dict[str, Scattered], device: torch.device, memory: Tensor | None = None) -> None:
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

    def _lay_out(self, state: dict[str, Scattered]) -> dict[str, Scattered]:
        laid_out: dict[str, Scattered] = {}
        position = 0
        for name, held in state.items():
            boxes = []
            for box, values in held.boxes:
                size = box.size * held.dtype.itemsize
                here = self._memory[position : position + size].view(held.dtype).view(values.shape)
                boxes.append((box, here))
                position += _aligned(size)
            laid_out[name] = Scattered(held.full_shape, held.dtype, tuple(boxes))
        return laid_out

    def position_of(self, values: Tensor) -> int:
        """Where a staged tensor lies in the file."""
        return values.data_ptr() - self._memory.data_ptr()

    def fill(self, state: dict[str, Scattered]) -> None:
        """Copy, or on a GPU begin to copy: `wait` before anything of it changes."""
        if self._stream is None:
            self._copy(state)
            return
        assert self._thread is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        away = {name: held for name, held in state.items() if not any(values.is_cuda for _, values in held.boxes)}
        with torch.cuda.stream(self._stream):
            self._copy({name: held for name, held in state.items() if name not in away})
            self._copied.record()
        self._copying = self._thread.submit(self._copy_on_stream, away)

    def _copy_on_stream(self, state: dict[str, Scattered]) -> None:
        with torch.cuda.stream(self._stream):
            self._copy(state)

    def _copy(self, state: dict[str, Scattered]) -> None:
        for name, held in state.items():
            for number, ((_, here), (_, values)) in enumerate(zip(self.state[name].boxes, held.boxes, strict=True)):
                whole = join_halves(held.near[number].to(values.device), values) if held.near else values
                here.copy_(whole, non_blocking=values.is_cuda)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        if self._copying is not None:
            self._copying.result()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
