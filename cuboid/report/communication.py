"""Bytes a step moves, by dimension and link: predicted, and counted where the run was asked to count."""

from __future__ import annotations

from typing import Any

from cuboid.planning.collectives import unforeseen
from cuboid.planning.traffic import moved
from cuboid.report.source import Source
from cuboid.spec.placement import CARRIES
from cuboid.telemetry.communication_ledger import Ledger


def communication(source: Source) -> dict[str, Any] | None:
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
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if not lines:
            continue
        ranks += 1
        ledger = Ledger.from_line(lines[-1])
        surprises += [f"rank {rank} {line}" for line in unforeseen(source.run, rank, ledger)]
        sums: dict[str, float] = {}
        for (dimension, _), entry in ledger.entries.items():
            sums[dimension] = sums.get(dimension, 0.0) + entry.sent
        for dimension, sent in sums.items():
            found[dimension] = max(found.get(dimension, 0), round(sent))
    return found, ranks, surprises
