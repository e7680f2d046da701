"""What each rank's memory held at its fullest, in `memory-RANK.jsonl`: a row whenever that has grown.

On a GPU the peak is what the allocator handed out at once; on a CPU it is the process's resident memory, in which
everything that was there before the model counts too, so that is kept apart."""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path

import torch

from cuboid.parallel.parallelize import Engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.rows import Rows

FILES = "memory-*.jsonl"
WORTH = 1.01
"""Growth that is worth a row."""


def resident_peak() -> int:
    """Most bytes of memory this process has had."""
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def exhaust(device: torch.device) -> None:
    """Ask for more memory than there is."""
    on_gpu = device.type == "cuda"
    torch.empty(torch.cuda.mem_get_info(device)[1] if on_gpu else 1 << 62, dtype=torch.uint8, device=device)


class MemoryLog:
    def __init__(self, run: Run, rank: int, device: torch.device) -> None:
        """Made before the model, to know what was there without it."""
        self._path = Path(run.output.folder) / FILES.replace("*", f"{rank:05d}")
        self._device = device
        self._before = 0 if device.type == "cuda" else resident_peak()
        self._told = 0.0
        self._rows: Rows | None = None

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()

    def record(self, step: int, engine: Engine, optimizer: Optimizer) -> None:
        on_gpu = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else resident_peak()
        if peak < self._told * WORTH:
            return
        self._told = peak
        held = [unit.held_bytes() for unit in engine.units]
        row = {
            "step": step + 1,
            "measured": "allocated" if on_gpu else "resident",
            "device": torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            "host": socket.gethostname(),
            "peak": peak,
            "before": self._before,
            "weights": sum(part["parameters"] for part in held),
            "gradients": sum(part["gradients"] for part in held),
            "optimizer": sum(part["master"] for part in held) + optimizer.state_bytes(),
            "offloaded": optimizer.host_bytes,
        }
        if self._rows is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = Rows(self._path)
        self._rows.append(row)
