"""Norms by layer over the steps, of a run that measured them (`output.layer_norms`)."""

from __future__ import annotations

from typing import Any

from cuboid.report.source import Source, buckets
from cuboid.training.rows import layer_names

LABELS = {
    "activation_rms": "activations behind each block, RMS",
    "gradient_norm": "gradients, norm",
    "update_norm": "updates, norm",
    "relative_update": "updates over weights",
    "weight_norm": "weights, norm",
}
COLUMNS = 160
"""Steps shown; of more, each stands for several."""


def layers(source: Source) -> dict[str, Any] | None:
    rows = [row for row in source.rows if isinstance(row.get("layers"), dict)]
    if not rows:
        return None
    shown = [rows[part[-1]] for part in buckets(len(rows), COLUMNS)]
    kinds = []
    for kind, label in LABELS.items():
        columns = [row["layers"].get(kind, []) for row in shown]
        places = layer_names(kind, len(columns[-1]))
        if places and all(len(column) == len(places) for column in columns):
            kinds.append({"name": kind, "label": label, "places": places, "values": columns})
    return {"steps": [row["step"] for row in shown], "measured": len(rows), "kinds": kinds} if kinds else None
