"""What a step of each rank is made of, as its supervisor measured it: who computes, who waits, who reads data."""

from __future__ import annotations

from typing import Any

from cuboid.report.source import Row, Source, finite
from cuboid.spec.ranks import coordinates

PARTS = {"compute": "computing", "wait": "waiting for other ranks", "data": "reading data", "save": "saving"}
MOST = 256
"""Ranks told one by one; of more, those that wait least and most."""


def shares(source: Source) -> dict[str, Any] | None:
    """The newest window of every supervisor."""
    found: dict[int, Row] = {}
    step = 0
    for _, path in source.rank_files("ranks-*.jsonl"):
        lines = source.lines_of(path.name)
        if lines:
            step = max(step, int(lines[-1].get("step", 0)))
            found |= {int(entry["rank"]): entry for entry in lines[-1].get("ranks", ())}
    known = {rank: entry for rank, entry in found.items() if rank < source.run.layout.world_size}
    if not known:
        return None
    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "pp": coordinates(rank, source.run.layout).pp,
            "parts": {name: finite(entry.get(name)) or 0.0 for name in PARTS},
        }
        for rank, entry in sorted(known.items())
    ]
    told = sorted(rows, key=lambda row: row["parts"]["wait"])
    if len(rows) > MOST:
        rows = sorted([*told[: MOST // 2], *told[-MOST // 2 :]], key=lambda row: row["rank"])
    slowest = next((row["slowest"] for row in reversed(source.rows) if isinstance(row.get("slowest"), dict)), None)
    return {"step": step, "parts": PARTS, "ranks": rows, "of": len(known), "slowest": slowest}
