"""How busy the experts of each layer are, over the mean expert of the layer: now and over time."""

from __future__ import annotations

from typing import Any

from cuboid.report.source import Row, Source, finite
from cuboid.spec.run import Run
from cuboid.training.folder import EXPERTS

NUMBERS = 150_000
"""Loads a page holds: of a large model only some windows, the last one always."""


def experts(source: Source, numbers: int = NUMBERS) -> dict[str, Any] | None:
    mixture = source.run.model.mixture
    rows = source.rows_of(EXPERTS)
    if mixture is None or not rows:
        return None
    first, size = mixture.first_dense_layers, len(rows[-1]["loads"]) * mixture.experts
    shown = max(1, min(len(rows), numbers // size))
    frames = [rows[-1 - index * len(rows) // shown] for index in range(shown)][::-1]
    return {
        "layers": list(range(first, source.run.model.layers)),
        "experts": mixture.experts,
        "most": mixture.experts / mixture.top_k,
        "steps": [[row["first"], row["step"]] for row in rows],
        "busiest": [[max(loads) / 100 for loads in row["loads"]] for row in rows],
        "idle": [[loads.count(0) for loads in row["loads"]] for row in rows],
        "frames": [{"first": row["first"], "step": row["step"], "loads": row["loads"]} for row in frames],
    }


def busiest(row: Row, run: Run) -> dict[str, Any]:
    """What one row of `metrics.jsonl` says of the experts; nothing of a model without."""
    routers = row.get("routers") or {}
    loads = [finite(load) or 0.0 for load in routers.get("largest_load", ())]
    if not loads or run.model.mixture is None:
        return {"largest_load": None, "busiest_layer": None, "dead_experts": None}
    layer = run.model.mixture.first_dense_layers + loads.index(max(loads))
    return {"largest_load": max(loads), "busiest_layer": layer, "dead_experts": routers.get("dead", 0)}
