"""What one rank holds and sees in a step, as far as its collectives depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from cuboid.spec.partition import partition
from cuboid.spec.ranks import coordinates
from cuboid.spec.run import Run
from cuboid.spec.sharding import DeclaredUnit, Part, ShardingRank, is_block_linear, lay_out, units
from cuboid.telemetry.communication_ledger import Kind

ELEMENT = {"bf16": 2, "fp16": 2, "float32": 4, "float64": 8}
"""Precision -> bytes of a parameter or an activation."""


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one step."""

    dimension: str
    kind: Kind
    ranks: int
    calls: int
    size: int
    """Bytes of each, as `telemetry.communication_ledger` counts them."""
    what: str
    """What they carry, with the formula of their size."""


@dataclass(frozen=True)
class HeldUnit:
    """A unit as one rank holds it."""

    name: str
    parts: list[Part]
    uses: int
    routed: bool
    """Whether it holds routed experts, which other ranks hold alike than the rest."""
    begin: int
    """The first element that this rank keeps of it under ZeRO."""
    shard: int
    """How many it keeps, padding included."""
    shards: int

    @property
    def flat(self) -> int:
        """Elements of all shards."""
        return self.shard * self.shards


class RankStep:
    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.layout, self.model = run, run.layout, run.model
        self.micro_batches = run.micro_batches
        self.element = ELEMENT[run.training.weights]
        self.wide = max(self.element, 4)
        """Bytes of a gradient, a logit or a loss: never less than float32."""
        self.rank, self.place = rank, coordinates(rank, self.layout)
        self.tokens = self.layout.micro_batch * run.training.sequence // self.layout.cp
        """Of a micro-batch on this rank, those of its tensor-parallel neighbours included."""
        self.stages = self.layout.stages_of(self.place.pp)
        self.first, self.last = 0 in self.stages, self.layout.stages - 1 in self.stages
        layers = partition(self.model, self.layout.stages, run.training.sequence)
        self.layers = [layer for stage in self.stages for layer in layers[stage]]
        self.recompute = {
            layer: self.layout.recompute_at(place) for stage in self.stages for place, layer in enumerate(layers[stage])
        }
        """What each of them computes again."""
        self.units = [self._held(unit) for unit in units(self.model, self.layers, self.first, self.last)]

    def _held(self, unit: DeclaredUnit) -> HeldUnit:
        layout = self.layout
        place = ShardingRank(layout.tp, self.place.tp, layout.ep, self.rank % layout.ep, layout.sequence_parallel)
        parts = lay_out(unit.parameters, place)
        shards, index = layout.shard_size * layout.cp, self.place.dp * layout.cp + self.place.cp
        if unit.routed:
            shards, index = layout.expert_shard_size, self.rank // layout.ep
        if not layout.zero or not unit.uses:  # what no micro-batch uses is never split
            shards = 1
        shard = -(-(parts[-1].offset + parts[-1].size) // shards)
        return HeldUnit(unit.name, parts, unit.uses, unit.routed, index % shards * shard, shard, shards)

    def narrow_parts(self, unit: HeldUnit) -> list[Part]:
        """What of a unit ZeRO 3 gathers in fp8: the rest travels with their scales."""
        training = self.run.training
        if training.precision != "fp8" or training.fp8_scaling != "tensor" or self.layout.zero < 3:
            return []
        return [part for part in unit.parts if is_block_linear(unit.name, part.name, part.full_shape)]
