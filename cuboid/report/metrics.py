"""What a run measured: curves over its steps with checkpoints, failures and recoveries on the same axis; norms by
layer; the load of experts; what a step of each rank is made of."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cuboid.readers import read_rows
from cuboid.report.source import Source, buckets, finite, short, thinned
from cuboid.resilience.bad_steps import bad_steps
from cuboid.spec.ranks import coordinates
from cuboid.spec.run import Run
from cuboid.telemetry.rows import Row, are_rank_times
from cuboid.training.run_folder import EXPERTS, layer_names

SERIES = {
    "loss": ("loss", ""),
    "learning_rate": ("learning rate", ""),
    "gradient_norm": ("gradient norm", ""),
    "activation_rms": ("activations before the head, RMS", ""),
    "tokens_per_second": ("throughput", "tokens/s"),
    "seconds": ("step time", "s"),
    "imbalance": ("work of the busiest replica over the mean", ""),
    "imbalance_in_order": ("… if sequences were taken in their order", ""),
}
"""Key of a row -> what it is called, its unit."""
OPTIONAL = ("imbalance", "imbalance_in_order")
"""Shown where rows have them."""


def curves(source: Source) -> dict[str, Any] | None:
    rows = source.rows
    if not rows:
        return None
    parts = buckets(len(rows))
    series = [
        {"name": name, "label": label, "unit": unit, **thinned([finite(row.get(name)) for row in rows], parts)}
        for name, (label, unit) in SERIES.items()
        if name not in OPTIONAL or name in rows[-1]
    ]
    times = [finite(row.get("time")) for row in rows]
    seconds = sorted(value for row in rows[1:] or rows if (value := finite(row.get("seconds"))) is not None)
    return {
        "steps": [rows[part[-1]]["step"] for part in parts],
        "times": [times[part[-1]] for part in parts],
        "rows": len(rows),
        "each": max(len(part) for part in parts),
        "planned_steps": source.run.training.steps,
        "series": series,
        "validation": [
            [row["step"], short(value)] for row in rows if (value := finite(row.get("validation_loss"))) is not None
        ],
        "spread": {f"p{percent}": short(seconds[_position(percent, len(seconds))]) for percent in (5, 50, 95, 99)}
        if seconds
        else None,
        "events": events(source),
    }


def _position(percent: int, count: int) -> int:
    return min(count - 1, round(percent / 100 * (count - 1)))


def events(source: Source) -> list[dict[str, Any]]:
    """Failures, restarts, checkpoints, warnings and steps skipped, each at the step where it came; oldest first."""
    found: list[dict[str, Any]] = []
    for row in source.rows:
        if row.get("finite") is False:
            scale = row.get("loss_scale", 0.0)
            why = f"overflow at loss scale {scale:,.0f}" if row.get("overflowed") else "not finite"
            found.append({"step": row["step"], "kind": "skipped", "text": f"{why}: the update was skipped"})
        for trouble in row.get("warnings", ()):
            found.append({"step": row["step"], "kind": "warning", "text": trouble["text"]})
        for save in row.get("checkpoints", ()):
            if save.get("bytes"):
                text = (
                    f"checkpoint of step {save['step']}: {save['bytes'] / 1e6:,.1f} MB in {save['write_seconds']:.2f} s"
                )
                found.append({"step": save["step"], "kind": "checkpoint", "text": text})
    known = {event["step"] for event in found if event["kind"] == "skipped"}
    for bad in bad_steps(source.folder) if source.folder is not None else ():
        at = bad["step"]
        did = f": {bad['action']}" if isinstance(bad.get("action"), str) else ""
        if at not in known:
            found.append({"step": at, "kind": "skipped", "text": f"bad step, {bad.get('reason', '')}{did}"})
    for failure in source.failures:
        after = f"started again from step {failure.checkpoint}" if failure.restarted else "the run ended"
        where = f" on {failure.node}" if failure.node else ""
        lost = f", {failure.seconds_lost:.3g} s to be done again" if failure.seconds_lost else ""
        at = _step_at(source.rows, failure.time)
        at = failure.checkpoint if at is None else at
        text = f"{failure.reason}{where}; {after}{lost}"
        found.append({"step": at, "kind": "failure", "time": failure.time, "text": text})
    return sorted(found, key=lambda event: event["step"])


def _step_at(rows: list[Row], moment: str) -> int | None:
    """The last step whose row was written before; rows of steps that were done again are younger than the failure."""
    try:
        when = datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None
    known = [row["step"] for row in rows if isinstance(row.get("time"), int | float) and row["time"] <= when]
    return max(known, default=None)


NORM_LABELS = {
    "activation_rms": "activations behind each block, RMS",
    "gradient_norm": "gradients, norm",
    "update_norm": "updates, norm",
    "relative_update": "updates over weights",
    "weight_norm": "weights, norm",
}
NORM_COLUMNS = 160
"""Steps shown; of more, each stands for several."""


def layers(source: Source) -> dict[str, Any] | None:
    """Norms by layer over the steps, of a run that measured them (`output.layer_norms`)."""
    rows = [row for row in source.rows if isinstance(row.get("layers"), dict)]
    if not rows:
        return None
    shown = [rows[part[-1]] for part in buckets(len(rows), NORM_COLUMNS)]
    kinds = []
    for kind, label in NORM_LABELS.items():
        columns = [row["layers"].get(kind, []) for row in shown]
        places = layer_names(kind, len(columns[-1]))
        if places and all(len(column) == len(places) for column in columns):
            kinds.append({"name": kind, "label": label, "places": places, "values": columns})
    return {"steps": [row["step"] for row in shown], "measured": len(rows), "kinds": kinds} if kinds else None


EXPERT_NUMBERS = 150_000
"""Loads a page holds: of a large model only some windows, the last one always."""


def experts(source: Source, numbers: int = EXPERT_NUMBERS) -> dict[str, Any] | None:
    """How busy the experts of each layer are, over the mean expert of the layer: now and over time."""
    mixture = source.run.model.mixture
    rows = source.rows_of(EXPERTS)
    if mixture is None or not rows:
        return None
    first, size = mixture.first_dense_layers, len(rows[-1]["loads"]) * mixture.experts
    shown = max(1, min(len(rows), numbers // size))
    frames = [rows[-1 - index * len(rows) // shown] for index in range(shown)][::-1]
    return {
        "layers": list(range(first, source.run.model.all_layers)),
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


RANK_PARTS = {"compute": "computing", "wait": "waiting for other ranks", "data": "reading data", "save": "saving"}
MOST_RANKS = 256
"""Ranks told one by one; of more, those that wait least and most."""


def rank_time(source: Source) -> dict[str, Any] | None:
    """What a step of each rank is made of (computing, waiting, reading data), as its supervisor measured it in its
    newest window."""
    found: dict[int, Row] = {}
    step = 0
    for _, path in source.rank_files("ranks-*.jsonl"):
        lines = read_rows(path, are_rank_times)
        if lines:
            step = max(step, lines[-1]["step"])
            found |= {entry["rank"]: entry for entry in lines[-1].get("ranks", ())}
    known = {rank: entry for rank, entry in found.items() if rank < source.run.layout.world_size}
    if not known:
        return None
    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "pp": coordinates(rank, source.run.layout).pp,
            "parts": {name: finite(entry.get(name)) or 0.0 for name in RANK_PARTS},
        }
        for rank, entry in sorted(known.items())
    ]
    told = sorted(rows, key=lambda row: row["parts"]["wait"])
    if len(rows) > MOST_RANKS:
        rows = sorted([*told[: MOST_RANKS // 2], *told[-MOST_RANKS // 2 :]], key=lambda row: row["rank"])
    slowest = next((row["slowest"] for row in reversed(source.rows) if isinstance(row.get("slowest"), dict)), None)
    return {"step": step, "parts": RANK_PARTS, "ranks": rows, "of": len(known), "slowest": slowest}
