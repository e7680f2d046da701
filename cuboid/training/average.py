"""A moving average of the weights, kept by each rank for the optimizer shards it keeps: as ZeRO splits master weights,
in float32 or wider."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.precision import join_halves
from cuboid.parallel.zero import OptimizerShard, Unit


class WeightAverage:
    def __init__(self, units: Sequence[Unit], decay: float, compiled: bool) -> None:
        self._units, self._decay, self._compiled = units, decay, compiled
        self._kept = {
            shard.part.name: torch.empty(shard.stop - shard.start, dtype=unit.accumulate, device=shard.stored.device)
            for unit in units
            for shard in unit.optimizer_shards()
        }
        self.begin()

    @property
    def device_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def of(self, shard: OptimizerShard) -> Tensor:
        return self._kept[shard.part.name]

    def begin(self) -> None:
        """As the weights are now."""
        for shard in self._shards():
            self.of(shard).copy_(shard.master)

    def move(self, counts: Tensor) -> None:
        """After an update; `counts`: false skips it. On the device: the host waits for nothing."""
        rate = counts.double() * (1 - self._decay)
        for shard in self._shards():
            weight = shard.weight.view(torch.int16) if shard.is_halved and shard.weight is not None else None
            _pass(self._compiled)(self.of(shard), shard.kept, weight, rate)

    def swap(self) -> None:
        """The weights become their average, and what is kept of it the weights; once more, and both are as before."""
        for unit in self._units:
            unit.settle_gather()  # it would write over what is swapped
            for shard in unit.optimizer_shards():
                weights = shard.master.clone()
                shard.set_master(self.of(shard))
                self.of(shard).copy_(weights)
            unit.publish()

    def _shards(self) -> list[OptimizerShard]:
        return [shard for unit in self._units for shard in unit.optimizer_shards()]


def _move(average: Tensor, kept: Tensor, weight: Tensor | None, rate: Tensor) -> None:
    """`weight`: as int16, where `kept` holds the other half of each master weight."""
    master = kept if weight is None else join_halves(weight, kept)
    average.copy_(torch.lerp(average, master, rate.to(average.dtype)))


@cache
def _pass(compiled: bool) -> Any:
    """One pass over memory, where it is compiled."""
    return torch.compile(_move, dynamic=True, fullgraph=True) if compiled else _move
