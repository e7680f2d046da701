"""Optimizer state in CPU memory, brought to the device, updated there and taken back, one load after another.

While a load is updated the next one arrives and the one before leaves, each on a stream of its own, so a step waits for
the slower of update and link, and that wait lies under the next step's forward pass as far as this is long enough.
What is computed is what is computed without: the same code on the same numbers.

What goes away: both moments, and master weights, or the 16 bits of each, where only the update reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.pinned_memory import PinnedMemory, bytes_taken
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.training.adamw import ROW, Elements, named_moments

LOAD = 2**24
"""Most elements brought at once: copying them takes milliseconds, launching the copies microseconds."""
SLOTS = 3
"""Places on the device: for the load that arrives, the one that is updated and the one that leaves."""


class Moment:
    """An event that streams wait for; without streams there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Of a moment that was never recorded: not at all."""
        if self._event is not None:
            self._event.wait()


@dataclass(frozen=True)
class Cut:
    """Some elements of a unit's optimizer shard."""

    optimizer_shard: int
    start: int
    stop: int
    place: int
    """Where the first of them lies in the load."""


@dataclass(frozen=True)
class Load:
    """A stretch of a unit's shard."""

    start: int
    stop: int
    cuts: tuple[Cut, ...]
    back: Moment
    """When the last step's results are in CPU memory."""


class Held:
    """What lies in CPU memory of one unit."""

    def __init__(self, unit: Unit, memory: PinnedMemory) -> None:
        # Both moments in the dtype of gradients, float32 but for float64 runs; `kept` in that of the master weights.
        shape = (unit.shard_size,)
        self.first, self.second = (memory.take(shape, unit.accumulate) for _ in range(2))
        self.kept = None if unit.only_for_update is None else memory.take(shape, unit.only_for_update)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.first, self.second] if self.kept is None else [self.first, self.second, self.kept]


class Slot:
    """A place on the device for one load."""

    def __init__(self, size: int, dtypes: list[torch.dtype], device: torch.device) -> None:
        self.tensors = [torch.empty(size, dtype=dtype, device=device) for dtype in dtypes]
        self.arrived, self.updated, self.left = (Moment(device) for _ in range(3))

    def views(self, load: Load) -> list[Tensor]:
        return [tensor[: load.stop - load.start] for tensor in self.tensors]


class OffloadedState:
    def __init__(self, units: Sequence[Unit], device: torch.device, most: int = LOAD) -> None:
        """`most`: elements of a load, in whole rows."""
        self._loads = {unit.name: loads_of(unit, most, device) for unit in units}
        self._memory = PinnedMemory(sum(map(_bytes_away, units)), device)
        self._held = {unit.name: Held(unit, self._memory) for unit in units}
        on_gpu = device.type == "cuda"
        # Two copy streams: PCIe carries both directions at once, and copies on one stream would take turns.
        self._arriving: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._leaving: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        longest = max((load.stop - load.start for loads in self._loads.values() for load in loads), default=0)
        # Slots are shared by all units, so they are as long as the longest load, in dtypes that fit any of them.
        kept = next((unit.only_for_update for unit in units if unit.only_for_update is not None), None)
        dtypes = [units[0].accumulate] * 2 + ([] if kept is None else [kept])
        self._slots = [Slot(longest, dtypes, device) for _ in range(SLOTS)]
        self._turn = 0
        self._of_part: dict[str, tuple[Tensor, Tensor]] = {}
        for unit in units:
            held = self._held[unit.name]
            # The unit forgets its copy on the device: from here on its master weights live in CPU memory.
            if held.kept is not None:
                unit.keep_in(held.kept, self.settle)
            for optimizer_shard in unit.optimizer_shards():
                here = slice(
                    place_of(unit, optimizer_shard),
                    place_of(unit, optimizer_shard) + optimizer_shard.stop - optimizer_shard.start,
                )
                self._of_part[optimizer_shard.part.name] = (held.first[here], held.second[here])

    @property
    def device_bytes(self) -> int:
        return sum(tensor.nbytes for slot in self._slots for tensor in slot.tensors)

    @property
    def host_bytes(self) -> int:
        return self._memory.size

    def settle(self) -> None:
        """The host waits until everything is back in its memory."""
        if self._leaving is not None:
            self._leaving.synchronize()

    def tensors(self, optimizer_shard: OptimizerShard) -> dict[str, Tensor]:
        self.settle()
        return named_moments(self._of_part[optimizer_shard.part.name])

    def visit(self, units: Sequence[Unit]) -> Iterator[list[Elements]]:
        """On the current stream."""
        for unit in units:
            optimizer_shards, held = unit.optimizer_shards(), self._held[unit.name]
            for load in self._loads[unit.name]:
                slot = self._slots[self._turn % SLOTS]
                self._turn += 1
                here = slot.views(load)
                away = [tensor[load.start : load.stop] for tensor in held.tensors]
                # A load may arrive once the one before has left its slot, and its own last results are back.
                with torch.cuda.stream(self._arriving):
                    slot.left.wait()
                    load.back.wait()
                    # Not strict: a unit whose matmuls use the master weights keeps no others, and has two tensors.
                    for target, source in zip(here, away, strict=False):
                        target.copy_(source, non_blocking=True)
                    slot.arrived.record()
                # The caller queues the update on the current stream while it has control; nothing here blocks the host.
                slot.arrived.wait()
                yield [_elements(optimizer_shards[cut.optimizer_shard], cut, here) for cut in load.cuts]
                slot.updated.record()
                with torch.cuda.stream(self._leaving):
                    slot.updated.wait()
                    for source, target in zip(here, away, strict=False):
                        target.copy_(source, non_blocking=True)
                    slot.left.record()
                    load.back.record()


def _elements(optimizer_shard: OptimizerShard, cut: Cut, here: list[Tensor]) -> Elements:
    first, second, *rest = (tensor[cut.place : cut.place + cut.stop - cut.start] for tensor in here)
    # Where matmuls use the master weights, these are on the device already and no third tensor was brought.
    kept = optimizer_shard.kept[cut.start : cut.stop] if optimizer_shard.weight is None else rest[0]
    return Elements.of(optimizer_shard, kept, first, second, cut.start, cut.stop)


def _bytes_away(unit: Unit) -> int:
    shape = (unit.shard_size,)
    dtypes = [unit.accumulate, unit.accumulate, unit.only_for_update]
    return sum(bytes_taken(shape, dtype) for dtype in dtypes if dtype is not None)


def place_of(unit: Unit, optimizer_shard: OptimizerShard) -> int:
    """Where an optimizer shard begins in its unit's shard."""
    return optimizer_shard.part.offset + optimizer_shard.start - unit.begin


def loads_of(unit: Unit, most: int, device: torch.device) -> list[Load]:
    """Optimizer shards in their order, cut into whole rows where they are long, together where they are short."""
    assert most % ROW == 0
    loads: list[Load] = []
    cuts: list[Cut] = []
    start = 0
    for index, optimizer_shard in enumerate(unit.optimizer_shards()):
        begin, length = place_of(unit, optimizer_shard), optimizer_shard.stop - optimizer_shard.start
        # Cuts are whole rows of the compiled update, but for a shard's last: one graph serves all loads.
        for low in range(0, length, most):
            high = min(low + most, length)
            if cuts and begin + high - start > most:
                loads.append(_load(start, cuts, device))
                cuts = []
            if not cuts:
                start = begin + low
            cuts.append(Cut(index, low, high, begin + low - start))
    return [*loads, _load(start, cuts, device)] if cuts else loads


def _load(start: int, cuts: list[Cut], device: torch.device) -> Load:
    last = cuts[-1]
    return Load(start, start + last.place + last.stop - last.start, tuple(cuts), Moment(device))
