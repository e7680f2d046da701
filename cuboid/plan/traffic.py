"""How many bytes each dimension of a layout moves in a step, over which links, with the formulas that say so.

They are those of Cuboid's own engine, whichever engine's time is asked for: what `plan.exchanges` predicts of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from cuboid.plan.exchanges import exchanges
from cuboid.plan.plan import Plan
from cuboid.plan.rank_step import Exchange
from cuboid.spec.cluster import LinkTier
from cuboid.spec.layout import V_SHAPED, Layout
from cuboid.telemetry.communication_ledger import Entry, Kind

ORDER = ("tp", "kv", "sequence", "cp", "ep", "pp", "embedding", "data", "shard", "replicate")
"""Those that speak in every layer first; experts' own data-parallel groups and the whole world come last."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What one rank exchanges for one dimension in a step: the pipeline rank that sends most."""

    dimension: str
    tier: LinkTier
    """The slowest link between the ranks of its group."""
    parts: list[Exchange]
    """The largest first."""

    @property
    def bytes(self) -> float:
        """What the rank sends, by the ring algorithm."""
        return sum(map(sent, self.parts))

    @property
    def seconds(self) -> float:
        """What the links alone would need at their printed bandwidth."""
        return self.bytes / (self.tier.bandwidth * 1e9)

    @property
    def formulas(self) -> list[str]:
        """One for each part."""
        return [f"{part.calls:,} {part.kind}s of {part.what}{_wire(part)}" for part in self.parts]


def sent(part: Exchange) -> float:
    """Bytes on the wire."""
    return Entry(part.calls, part.calls * part.size, part.ranks, part.kind).sent


def _wire(part: Exchange) -> str:
    if part.kind == "send":
        return ""
    return f" × {'2·' if part.kind == 'all-reduce' else ''}({part.ranks}−1)/{part.ranks}"


def moved(plan: Plan) -> list[Moved]:
    """Every dimension that has more than one rank."""
    run, layout = plan.run, plan.layout
    stage = layout.world_size // layout.pp
    busiest: dict[str, list[Exchange]] = {}
    for rank in range(0, layout.world_size, stage):
        found: defaultdict[str, list[Exchange]] = defaultdict(list)
        for exchange in exchanges(run, rank):
            found[exchange.dimension].append(exchange)
        for dimension, parts in found.items():
            busiest[dimension] = max(busiest.get(dimension, parts), parts, key=_total)
    named = [name for name in ORDER if name in busiest]
    named += sorted(busiest.keys() - set(ORDER))
    return [
        Moved(dimension=name, tier=_tier(plan, name, busiest[name][0].ranks), parts=_joined(busiest[name]))
        for name in named
    ]


def _total(parts: list[Exchange]) -> float:
    return sum(map(sent, parts))


def _joined(parts: list[Exchange]) -> list[Exchange]:
    """Exchanges of the same kind, size and meaning as one, the largest first."""
    calls: defaultdict[tuple[str, Kind, int, int, str], int] = defaultdict(int)
    for part in parts:
        calls[part.dimension, part.kind, part.ranks, part.size, part.what] += part.calls
    joined = [Exchange(*key[:3], count, *key[3:]) for key, count in calls.items()]
    return sorted(joined, key=sent, reverse=True)


def _tier(plan: Plan, dimension: str, ranks: int) -> LinkTier:
    """Between the first and the last rank of the first group; neighbours, for the messages of a pipeline."""
    layout = plan.layout
    if dimension == "cp":
        ranks = layout.cp  # whichever part of it exchanges heads
    elif dimension == "pp" and (layout.vpp == 1 or layout.schedule in V_SHAPED):
        ranks = 2  # stages that go round also send from the last rank to the first, the longest way of all
    return plan.question.cluster.tier_of([0, (ranks - 1) * _stride(layout, dimension)])


def _stride(layout: Layout, dimension: str) -> int:
    """How far apart neighbours of a group are."""
    copies = layout.tp * layout.cp
    return {
        "cp": layout.tp,
        "data": layout.tp,
        "shard": layout.tp,
        "replicate": copies * layout.shard_size,
        "pp": copies * layout.dp,
        "embedding": copies * layout.dp * (layout.pp - 1),
        "expert_data": layout.ep,
        "expert_shard": layout.ep,
        "expert_replicate": layout.ep * layout.expert_shard_size,
    }.get(dimension, 1)


def parameters_held(plan: Plan) -> float:
    """Parameters of the fullest pipeline rank by its weights, before ZeRO splits them."""
    layout = plan.layout
    split = layout.shard_size * layout.cp if layout.zero >= 3 else 1
    return max(row["weights"] for row in plan.memory) / plan.question.profile.weight_bytes * split
