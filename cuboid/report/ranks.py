"""The cuboid: which rank sits on which node, and which links each kind of group crosses.

Groups are told by stride and size, from which a page finds the group of any rank, however many there are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cuboid.report.source import Source
from cuboid.spec.layout import Layout
from cuboid.spec.placement import traffic


def ranks(source: Source) -> dict[str, Any]:
    layout, plan = source.run.layout, source.plan
    found: dict[str, Any] = {
        "world_size": layout.world_size,
        "degrees": {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep")},
        "stages_of": [list(layout.stages_of(rank)) for rank in range(layout.pp)],
        "last_stage_rank": layout.last_stage_rank,
        "groups": _strides(layout),
        "per_node": layout.world_size,
        "tiers": [],
        "traffic": [],
    }
    if plan is None:
        return found
    cluster = plan.question.cluster
    found["per_node"] = cluster.accelerators_per_node
    found["tiers"] = [asdict(tier) for tier in cluster.tiers]
    found["traffic"] = [
        {
            "kind": line.kind,
            "carries": line.carries,
            "size": line.size,
            "groups": len(line.groups),
            "tiers": line.tiers,
            "slowest": line.slowest.name,
        }
        for line in traffic(layout, cluster, tied=source.run.model.tie_embeddings)
    ]
    return found


def _strides(layout: Layout) -> dict[str, dict[str, int]]:
    """Kind -> how far apart neighbours of a group are, and how many ranks it has; as `spec.ranks.groups` makes them."""
    copies = layout.dp * layout.cp
    shard = layout.shard_size * layout.cp if layout.zero else 1
    found = {
        "tp": (1, layout.tp),
        "cp": (layout.tp, layout.cp),
        "ep": (1, layout.ep),
        "pp": (layout.tp * copies, layout.pp),
        "data": (layout.tp, copies),
    }
    if layout.zero and layout.shard_size < layout.dp:
        del found["data"]
        found |= {"shard": (layout.tp, shard), "replicate": (layout.tp * shard, copies // shard)}
    return {kind: {"stride": stride, "size": size} for kind, (stride, size) in found.items() if size > 1}
