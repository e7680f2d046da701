"""A layout put on a cluster: which ranks sit on which node, and which links each group's traffic crosses."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from cuboid.spec.cluster import ClusterSpec, LinkTier
from cuboid.spec.fitting import check_world_size
from cuboid.spec.layout import V_SHAPED, Layout
from cuboid.spec.ranks import Group, coordinates, groups

CARRIES = {
    "tp": "layer activations",
    "cp": "keys and values",
    "ep": "tokens to experts",
    "pp": "stage activations",
    "data": "gradients",
    "shard": "sharded state",
    "replicate": "gradients of shards",
    "embedding": "tied embedding",
}
"""Kind of group -> what travels in it; those that speak in every layer come first."""


@dataclass(frozen=True)
class TensorRow:
    """Ranks of one node that share everything but their tensor coordinate; on most layouts, one tensor group."""

    pp: int
    dp: int
    cp: int
    ranks: Group


@dataclass(frozen=True)
class Traffic:
    """What the groups of one kind send, and over which links."""

    kind: str
    carries: str
    size: int
    groups: tuple[Group, ...]
    tiers: dict[str, int]
    """Slowest tier a group crosses -> how many groups; for pp, of the hops between neighbours."""
    slowest: LinkTier


def node_rows(layout: Layout, cluster: ClusterSpec, node: int) -> list[TensorRow]:
    """What sits on a node, one row for each stage, replica and part of the sequence on it."""
    rows: dict[tuple[int, int, int], list[int]] = {}
    first = node * cluster.accelerators_per_node
    for rank in range(first, first + cluster.accelerators_per_node):
        place = coordinates(rank, layout)
        rows.setdefault((place.pp, place.dp, place.cp), []).append(rank)
    return [TensorRow(pp, dp, cp, tuple(ranks)) for (pp, dp, cp), ranks in rows.items()]


def stage_nodes(layout: Layout, cluster: ClusterSpec, pipeline_rank: int) -> tuple[int, int]:
    """The first and the last node that hold a pipeline rank."""
    size = layout.world_size // layout.pp
    return cluster.node_of(pipeline_rank * size), cluster.node_of((pipeline_rank + 1) * size - 1)


def traffic(layout: Layout, cluster: ClusterSpec, *, tied: bool = True) -> list[Traffic]:
    """Every kind of group with more than one rank in it; `tied` says whether the model ties its embeddings."""
    check_world_size(layout, cluster.accelerators)
    found, kinds = groups(layout), dict(CARRIES)
    hybrid = layout.zero > 0 and layout.shard_size < layout.dp
    for kind in ("data",) if hybrid else ("shard", "replicate"):
        del kinds[kind]
    if layout.zero and not hybrid:
        kinds["data"] = CARRIES["shard"]
    if not tied:
        del kinds["embedding"]
    return [
        _traffic(kind, carries, found[kind], layout, cluster)
        for kind, carries in kinds.items()
        if found[kind] and len(found[kind][0]) > 1
    ]


def _traffic(kind: str, carries: str, members: tuple[Group, ...], layout: Layout, cluster: ClusterSpec) -> Traffic:
    talks = [pair for group in members for pair in _hops(group, layout)] if kind == "pp" else members
    crossed = Counter(cluster.tier_of(talk).name for talk in talks)
    ordered = [tier for tier in cluster.tiers if tier.name in crossed]
    tiers = {tier.name: crossed[tier.name] for tier in ordered}
    return Traffic(kind, carries, len(members[0]), members, tiers, ordered[-1])


def _hops(line: Group, layout: Layout) -> Iterator[Group]:
    """Pairs of pipeline ranks that send to each other: neighbours, and last to first where stages go round."""
    yield from pairwise(line)
    if layout.vpp > 1 and layout.schedule not in V_SHAPED and len(line) > 2:
        yield line[-1], line[0]
