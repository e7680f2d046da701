"""What a run measured over its steps, with its checkpoints, failures and recoveries on the same axis."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cuboid.report.source import Row, Source, buckets, finite, short, thinned
from cuboid.resilience.bad_steps import FILE as BAD_STEPS

SERIES = {
    "loss": ("loss", ""),
    "learning_rate": ("learning rate", ""),
    "gradient_norm": ("gradient norm", ""),
    "activation_rms": ("activations before the head, RMS", ""),
    "tokens_per_second": ("throughput", "tokens/s"),
    "seconds": ("step time", "s"),
}
"""Key of a row -> what it is called, its unit."""


def curves(source: Source) -> dict[str, Any] | None:
    rows = source.rows
    if not rows:
        return None
    parts = buckets(len(rows))
    series = [
        {"name": name, "label": label, "unit": unit, **thinned([finite(row.get(name)) for row in rows], parts)}
        for name, (label, unit) in SERIES.items()
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
        "spread": {f"p{share}": short(seconds[_position(share, len(seconds))]) for share in (5, 50, 95, 99)}
        if seconds
        else None,
        "events": events(source),
    }


def _position(share: int, count: int) -> int:
    return min(count - 1, round(share / 100 * (count - 1)))


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
    for bad in source.lines_of(BAD_STEPS):
        at = int(bad.get("step", 0))
        did = f": {bad['action']}" if isinstance(bad.get("action"), str) else ""
        if at not in known:
            found.append({"step": at, "kind": "skipped", "text": f"bad step, {bad.get('reason', '')}{did}"})
    for failure in source.failures:
        checkpoint, time = int(failure.get("checkpoint", 0)), str(failure.get("time", ""))
        after = f"started again from step {checkpoint}" if failure.get("restarted") else "the run ended"
        where = f" on {failure['node']}" if failure.get("node") else ""
        lost = f", {failure['seconds_lost']:.3g} s to be done again" if failure.get("seconds_lost") else ""
        step = _step_at(source.rows, time)
        text = f"{failure.get('reason', 'failed')}{where}; {after}{lost}"
        found.append({"step": checkpoint if step is None else step, "kind": "failure", "time": time, "text": text})
    return sorted(found, key=lambda event: event["step"])


def _step_at(rows: list[Row], moment: str) -> int | None:
    """The last step whose row was written before; rows of steps that were done again are younger than the failure."""
    try:
        when = datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None
    known = [row["step"] for row in rows if isinstance(row.get("time"), int | float) and row["time"] <= when]
    return max(known, default=None)
