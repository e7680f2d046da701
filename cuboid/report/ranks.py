"""The ranks: who sits on which node, which links each kind of group crosses, what a rank holds and what it moves.

Groups are told by stride and size, from which a page finds the group of any rank, however many there are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cuboid.planning.collectives import unforeseen
from cuboid.planning.plan import GIB
from cuboid.planning.traffic import moved
from cuboid.readers import read_rows
from cuboid.report.source import Source
from cuboid.spec.layout import Layout
from cuboid.spec.placement import CARRIES, traffic
from cuboid.spec.ranks import coordinates
from cuboid.telemetry.communication_ledger import Ledger
from cuboid.telemetry.rows import Row


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


CATEGORIES = {
    "weights": "parameters in the precision of the matmuls",
    "gradients": "gradients",
    "optimizer": "master weights and moments",
    "activations": "kept for the backward by micro-batches in flight",
    "logits": "the head's outputs",
    "transient": "alive for a moment: one layer, or the optimizer step",
    "buffers": "context, libraries, communication",
    "reserve": "what the allocator holds beyond that",
    "rest": "measured, of no kind told apart: activations and all that is alive for a moment",
}
HOW = {
    "allocated": "most bytes the GPU's allocator handed out at once",
    "resident": "peak resident memory of the process; what was there before the model counts as buffers",
}


def memory(source: Source) -> dict[str, Any] | None:
    """Memory of every pipeline rank by category: predicted, and measured where a run has been."""
    plan, measured = source.plan, source.memory
    if plan is None and not measured:
        return None
    how = sorted({str(row.get("measured")) for row in measured.values()})
    return {
        "categories": CATEGORIES,
        "limit": plan.question.cluster.memory_gib * GIB if plan else None,
        "predicted": [{"pp": rank, "parts": _rounded(row)} for rank, row in enumerate(plan.memory)] if plan else [],
        "measured": _fullest(source, measured),
        "measured_ranks": len(measured),
        "how": "; ".join(HOW.get(name, name) for name in how),
    }


def _rounded(parts: dict[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in parts.items()}


def _fullest(source: Source, measured: dict[int, Row]) -> list[dict[str, Any]]:
    """For each pipeline rank the rank that was the fullest, and the least peak beside it."""
    found: dict[int, list[tuple[int, Row]]] = {}
    for rank, row in measured.items():
        found.setdefault(coordinates(rank, source.run.layout).pp, []).append((rank, row))
    lines = []
    for stage, members in sorted(found.items()):
        rank, row = max(members, key=lambda member: member[1]["peak"])
        known = {name: row[name] for name in ("weights", "gradients", "optimizer")}
        before = min(row["before"], row["peak"])
        rest = max(0, row["peak"] - before - sum(known.values()))
        lines.append(
            {
                "pp": stage,
                "rank": rank,
                "ranks": len(members),
                "peak": row["peak"],
                "least": min(member["peak"] for _, member in members),
                "parts": {**known, "rest": rest, "buffers": before},
            }
        )
    return lines


def communication(source: Source) -> dict[str, Any] | None:
    """Bytes a step moves, by dimension and link: predicted, and counted where the run was asked to count."""
    counted, ranks, surprises = _counted(source)
    plan = source.plan
    lines = [
        {
            "dimension": entry.dimension,
            "tier": entry.tier.name,
            "bandwidth": entry.tier.bandwidth,
            "carries": CARRIES.get(entry.dimension, ""),
            "bytes": round(entry.bytes),
            "seconds": entry.seconds,
            "formulas": entry.formulas,
        }
        for entry in (moved(plan) if plan else ())
    ]
    if not lines and not counted:
        return None
    known = {str(line["dimension"]) for line in lines}
    lines += [{"dimension": name} for name in counted if name not in known]
    for line in lines:
        line["counted"] = counted.get(str(line["dimension"]))
    return {"lines": lines, "counted_ranks": ranks, "unforeseen": surprises}


def _counted(source: Source) -> tuple[dict[str, int], int, list[str]]:
    """Dimension -> bytes the busiest rank sent in the last step; how many ranks told; what was not foreseen."""
    found: dict[str, int] = {}
    surprises: list[str] = []
    ranks = 0
    for rank, path in source.rank_files("communication-*.jsonl"):
        rows = read_rows(path, Ledger.is_row)
        if not rows:
            continue
        ranks += 1
        ledger = Ledger.from_row(rows[-1])
        step = source.run.of_batch(rows[-1]["step"] - 1)
        surprises += [f"rank {rank} {line}" for line in unforeseen(step, rank, ledger)]
        sums: dict[str, float] = {}
        for (dimension, _), entry in ledger.entries.items():
            sums[dimension] = sums.get(dimension, 0.0) + entry.sent
        for dimension, sent in sums.items():
            found[dimension] = max(found.get(dimension, 0), round(sent))
    return found, ranks, surprises
