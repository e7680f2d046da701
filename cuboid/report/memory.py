"""Memory of every pipeline rank by category: predicted, and measured where a run has been."""

from __future__ import annotations

from typing import Any

from cuboid.planning.plan import GIB
from cuboid.report.source import Row, Source
from cuboid.spec.ranks import coordinates

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
