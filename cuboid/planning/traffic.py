"""How many bytes each dimension of a layout moves in a step, over which links, with the formulas that say so.

They are those of Cuboid's own engine, whichever engine's time is asked for: what `plan.collectives` predicts of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cuboid.planning.collectives import Collective, step_collectives
from cuboid.planning.plan import Plan
from cuboid.spec.cluster import ClusterSpec, LinkTier
from cuboid.spec.layout import Layout
from cuboid.spec.partition import partition
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.telemetry.communication_ledger import WIRE, Entry, Kind

ORDER = ("tp", "kv", "sequence", "cp", "ep", "pp", "embedding", "data", "shard", "replicate")
"""Those that speak in every layer first; experts' own data-parallel groups and the whole world come last."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What one rank communicates for one dimension in a step: the pipeline rank that sends most."""

    dimension: str
    tier: LinkTier
    """The slowest link between the ranks of its group."""
    parts: list[Collective]
    """The largest first."""
    links: dict[str, float]
    """Tier -> seconds that its links alone need at their printed bandwidth, with all ports the group has."""
    everyone: dict[str, float]
    """The same of what every rank sends; of messages to neighbours only some leave a domain."""

    @property
    def bytes(self) -> float:
        """What the rank sends, by the ring algorithm."""
        return sum(map(sent, self.parts))

    @property
    def seconds(self) -> float:
        """What the slowest of the links alone would need."""
        return max(self.links.values(), default=0.0)

    @property
    def formulas(self) -> list[str]:
        """One for each part."""
        return [f"{part.calls:,} {part.kind}s of {part.what}{_wire(part)}" for part in self.parts]


def bound(entries: list[Moved]) -> float:
    """Seconds that no step with this traffic undercuts: those of one dimension, or of all that share a kind of link."""
    tiers = {name for entry in entries for name in entry.links}
    shared = (sum(entry.everyone.get(name, 0.0) for entry in entries) for name in tiers)
    return max([*(entry.seconds for entry in entries), *shared], default=0.0)


def sent(part: Collective) -> float:
    """Bytes on the wire."""
    return Entry(part.calls, part.calls * part.size, part.ranks, part.kind).sent


def _wire(part: Collective) -> str:
    if part.kind == "send":
        return ""
    return f" × {'2·' if part.kind == 'all-reduce' else ''}({part.ranks}−1)/{part.ranks}"


def moved(plan: Plan) -> list[Moved]:
    """Every dimension that has more than one rank."""
    run = plan.run_with({})
    busiest: dict[str, list[Collective]] = {}
    for rank in _different_ranks(run):
        found: defaultdict[str, list[Collective]] = defaultdict(list)
        for collective in step_collectives(run, rank):
            found[collective.dimension].append(collective)
        for dimension, parts in found.items():
            busiest[dimension] = max(busiest.get(dimension, parts), parts, key=_total)
    named = [name for name in ORDER if name in busiest]
    named += sorted(busiest.keys() - set(ORDER))
    return [_entry(plan, name, busiest[name]) for name in named]


def _different_ranks(run: Run) -> list[int]:
    """A rank of every place in the pipeline, of places that hold alike of the first; all are of the busiest replica."""
    layout, model = run.layout, run.model
    layers = partition(model, layout.stages, run.training.sequence, layout.layers)
    own = isinstance(model, PythonModelSpec)  # whose layers may all differ
    found: dict[tuple[object, ...], int] = {}
    replica = layout.busiest_replica * layout.cp * layout.tp
    for place in range(layout.pp):
        stages = layout.stages_of(place)
        kinds = tuple(tuple(layer if own else model.has_experts(layer) for layer in layers[stage]) for stage in stages)
        ends = (place == 0, place == layout.pp - 1, 0 in stages, layout.stages - 1 in stages)
        found.setdefault((ends, kinds), place * layout.world_size // layout.pp + replica)
    return list(found.values())


def _entry(plan: Plan, dimension: str, parts: list[Collective]) -> Moved:
    layout, cluster = plan.layout, plan.question.cluster
    merged = _merged(parts)
    links: defaultdict[str, float] = defaultdict(float)
    everyone: defaultdict[str, float] = defaultdict(float)
    for part in merged:
        stride = _stride(layout, dimension)
        if dimension == "cp" and part.kind != "all-to-all":
            stride *= layout.cp_inner
        for tier, seconds, all_send in link_seconds(cluster, part, stride):
            links[tier.name] += seconds
            everyone[tier.name] += seconds * all_send
    # Of a job larger than the cluster (a profile of few ranks, say) no link spans some groups: the slowest counts.
    slowest = next((tier for tier in reversed(cluster.tiers) if tier.name in links), cluster.tiers[-1])
    return Moved(dimension=dimension, tier=slowest, parts=merged, links=dict(links), everyone=dict(everyone))


def link_seconds(cluster: ClusterSpec, part: Collective, stride: int) -> Iterator[tuple[LinkTier, float, bool]]:
    """The tiers that a collective of ranks `stride` apart crosses, the seconds of their links at the printed bandwidth,
    and whether every rank sends over them.

    Out of a domain of the tier below, a collective uses the ports of all members in it; a message has one."""
    ranks, below, size = part.ranks, 1, float(part.calls * part.size)
    for tier in cluster.tiers:
        here, within = (min(max(count / stride, 1.0), ranks) for count in (below, tier.size))
        if within > here:
            if part.kind == "send":
                moved = size
            elif part.kind == "all-to-all":
                # What goes further passes these links too, but not those inside a node.
                moved = size * ((ranks if below > 1 else within) - here) / ranks
            else:
                domains = ranks / here if below > 1 else within
                moved = WIRE[part.kind] * size * (domains - 1) / domains / here
            yield tier, moved / (tier.bandwidth * 1e9), part.kind != "send" or here == 1
        below = tier.size


def _total(parts: list[Collective]) -> float:
    return sum(map(sent, parts))


def _merged(parts: list[Collective]) -> list[Collective]:
    """Collectives of the same kind, size and meaning as one, the largest first."""
    calls: defaultdict[tuple[str, Kind, int, int, str], int] = defaultdict(int)
    for part in parts:
        calls[part.dimension, part.kind, part.ranks, part.size, part.what] += part.calls
    merged = [Collective(*key[:3], count, *key[3:]) for key, count in calls.items()]
    return sorted(merged, key=sent, reverse=True)


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
