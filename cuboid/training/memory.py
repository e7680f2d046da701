"""What a rank's memory holds: by kind, while a step runs, and at its fullest, in `memory-RANK.jsonl`.

On a GPU the peak is what the allocator handed out at once; on a CPU it is the process's resident memory, in which
everything that was there before the model counts too, so that is kept apart."""

from __future__ import annotations

import gc
import resource
import socket
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import Unit
from cuboid.spec.run import Run
from cuboid.training.callbacks import Callback
from cuboid.training.optimizer import Optimizer
from cuboid.training.run_folder import Rows

if TYPE_CHECKING:
    from cuboid.training.step import StepResult
    from cuboid.training.trainer import Trainer

KINDS = ("parameters", "master weights", "optimizer", "gradients")
FILES = "memory-*.jsonl"
WORTH = 1.01
"""Growth that is worth a row."""


def held(units: Iterable[Unit], optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes of what stays from step to step, by kind."""
    bytes_of = dict.fromkeys(KINDS, 0)
    for unit in units:
        own = unit.held_bytes()
        bytes_of["parameters"] += own["parameters"]
        bytes_of["master weights"] += own["master"]
        bytes_of["gradients"] += own["gradients"]
    bytes_of["optimizer"] = optimizer.state_bytes() if optimizer is not None else 0
    return bytes_of


def storages(units: Iterable[Unit], optimizer: Optimizer) -> set[int]:
    """Of what `held` counts."""
    # By storage, not by tensor: shards are views of one flat buffer.
    found = {
        moment.untyped_storage()._cdata
        for optimizer_shard in optimizer.optimizer_shards
        for moment in optimizer.state_of(optimizer_shard).values()
    }
    return found | {tensor.untyped_storage()._cdata for unit in units for tensor in unit.held_tensors()}


def left_by_autograd(units: Iterable[Unit]) -> int:
    """Bytes of gradients that no unit has taken over."""
    total = 0
    for unit in units:
        known = {tensor.untyped_storage()._cdata for tensor in unit.held_tensors()}
        grads = [parameter.grad for parameter in unit.parameters.values() if parameter.grad is not None]
        total += sum(grad.nbytes for grad in grads if grad.untyped_storage()._cdata not in known)
    return total


def held_here() -> dict[str, int]:
    """Of whatever this process has built so far: who runs out of memory may be in the middle of it."""
    # Not from the trainer, which may not exist yet: the model may be what did not fit.
    found = gc.get_objects()
    optimizers = [item for item in found if type(item) is Optimizer]
    bytes_of = dict.fromkeys(KINDS, 0)
    for unit in (item for item in found if type(item) is Unit):
        with suppress(AttributeError):  # half built
            bytes_of = {kind: bytes_of[kind] + size for kind, size in held([unit], None).items()}
            bytes_of["gradients"] += left_by_autograd([unit])
    with suppress(AttributeError):
        bytes_of["optimizer"] = sum(optimizer.state_bytes() for optimizer in optimizers)
    return bytes_of


class Tally(TorchDispatchMode):
    """Bytes of tensors alive on a CPU, which has no allocator that counts them: it follows every operation's results.
    While it is entered, it counts what is made and not yet gone, beside what `others` says it holds."""

    def __init__(self, known: set[int], others: Callable[[], int]) -> None:
        """`known`: addresses of storages that `others` counts; a unit's grow and shrink without an operation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._others = others
        self._alive: dict[int, int] = {}
        self._bytes = 0
        self.peak = 0
        self.beside = 0
        """Of the peak, what was made meanwhile."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd, so activations saved for the backward count for as long as they are held.
        result = function(*arguments, **(options or {}))
        given = {storage._cdata for storage in _storages((arguments, options))}
        for storage in _storages(result):
            if storage._cdata not in given:  # a view of something, data read from a file say, is not made here
                self._follow(storage)
        total = self._bytes + self._others()
        if total > self.peak:
            self.peak, self.beside = total, self._bytes
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        self._alive[key] = storage.nbytes()
        self._bytes += storage.nbytes()
        # No operation tells that a storage is freed; its finalizer does.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._alive.pop(key, 0)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def resident_peak() -> int:
    """Most bytes of memory this process has had."""
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def exhaust(device: torch.device) -> None:
    """Ask for more memory than there is."""
    on_gpu = device.type == "cuda"
    # 2^62 bytes are more than any address space has, whatever the machine's memory.
    torch.empty(torch.cuda.mem_get_info(device)[1] if on_gpu else 1 << 62, dtype=torch.uint8, device=device)


class MemoryLog(Callback):
    """`memory-RANK.jsonl`: a row whenever the peak has grown."""

    def __init__(self, run: Run, rank: int, device: torch.device) -> None:
        """Made before the model, to know what was there without it."""
        self._path = Path(run.output.folder) / FILES.replace("*", f"{rank:05d}")
        self._device = device
        self._before = 0 if device.type == "cuda" else resident_peak()
        self._told = 0.0
        self._rows: Rows | None = None

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        self.record(step, trainer.engine, trainer.optimizer)

    def record(self, step: int, engine: Engine, optimizer: Optimizer) -> None:
        on_gpu = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else resident_peak()
        # The peak only grows: a row each time it has, not one a step.
        if peak < self._told * WORTH:
            return
        self._told = peak
        held = [unit.held_bytes() for unit in engine.units]
        row = {
            "step": step,
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
            self._rows = Rows(self._path)
        self._rows.append(row)
