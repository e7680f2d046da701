"""The facts of a plan or a run that a person asks for first."""

from __future__ import annotations

from typing import Any

from cuboid.planning.plan import GIB, WORDS
from cuboid.report.source import Source, finite


def summary(source: Source) -> dict[str, Any]:
    run, plan = source.run, source.plan
    found: dict[str, Any] = {
        "model": {
            "name": run.model.name,
            "parameters": run.model.parameters,
            "layers": run.model.layers,
            "hidden": run.model.hidden,
            "vocabulary": run.model.vocab,
        },
        "layout": str(run.layout),
        "ranks": run.layout.world_size,
        "training": {
            "global_batch": run.training.global_batch,
            "sequence": run.training.sequence,
            "tokens_per_step": run.training.global_batch * run.training.sequence,
            "micro_batches": run.micro_batches,
            "precision": run.training.precision,
            "steps": run.training.steps,
        },
        "cluster": None,
        "predicted": None,
        "measured": measured(source),
        "goodput": goodput(source),
        "warnings": source.warnings,
    }
    if plan is not None:
        cluster = plan.question.cluster
        found["cluster"] = {
            "name": cluster.name,
            "accelerator": cluster.accelerator,
            "nodes": cluster.nodes,
            "per_node": cluster.accelerators_per_node,
            "memory_gib": cluster.memory_gib,
            "planned": bool(run.plan),
            "probed": source.probed is not None,
        }
        assumed = ["predicted for a machine that nobody measured; cuboid report --probe runs a few steps to do so"]
        found["predicted"] = {
            "step_seconds": plan.seconds,
            "tokens_per_second": plan.tokens * run.layout.world_size,
            "mfu": plan.utilization,
            "bubble": plan.bubble,
            "memory_gib": plan.peak / GIB,
            "memory_fraction": plan.memory_fraction,
            "parts": plan.parts,
            "words": WORDS,
            "layers": list(plan.layers),
            "reasons": list(plan.reasons),
            "warnings": [*(assumed if source.assumed else ()), *plan.warnings],
        }
    return found


def goodput(source: Source) -> dict[str, Any] | None:
    """The fraction of all time that went into steps that stand, as the run's last row has it, and where the rest
    went."""
    row = source.rows[-1] if source.rows else {}
    fraction, spent = finite(row.get("goodput")), row.get("spent")
    if fraction is None or not isinstance(spent, dict):
        return None
    seconds = {name: finite(value) or 0.0 for name, value in spent.items() if name not in ("until", "stopped", "steps")}
    return {"fraction": fraction, "spent": dict(sorted(seconds.items(), key=lambda item: -item[1]))}


def measured(source: Source) -> dict[str, Any] | None:
    """Of the steps there are rows of; speed without the first, which pays for warming up."""
    rows = source.rows
    if not rows:
        return None
    timed = [row for row in rows[1:] or rows if finite(row.get("seconds"))]
    losses = [value for row in rows if (value := finite(row.get("loss"))) is not None]
    seconds = sum(row["seconds"] for row in timed)
    speed = sum(row["tokens"] for row in timed) / seconds if seconds else None
    peaks = [row["peak"] for row in source.memory.values()]
    return {
        "steps": rows[-1]["step"],
        "tokens": source.run.training.batch_sizes.sum_before(rows[-1]["step"]) * source.run.training.sequence,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "step_seconds": sorted(row["seconds"] for row in timed)[len(timed) // 2] if timed else None,
        "tokens_per_second": speed,
        "mfu": utilization(source, speed) if speed else None,
        "memory_gib": max(peaks) / GIB if peaks else None,
        "finished": rows[-1]["step"] >= source.run.training.steps,
    }


def utilization(source: Source, tokens_per_second: float) -> float | None:
    """Model FLOPs over the peak of the cluster, as the planner counts them."""
    plan = source.plan
    if plan is None:
        return None
    return plan.utilization * tokens_per_second / (plan.tokens * source.run.layout.world_size)
