"""When every stage does what with every micro-batch: as predicted, as simulated from measured times, and as it was."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import Any

from cuboid.planning.refine import stage_seconds
from cuboid.report.measured import MeasuredStep, kept_steps, measure, stage_costs
from cuboid.report.source import Source, finite
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, Timeline, simulate
from cuboid.schedule.table import Action, Kind, Schedule

TICK = 1e-7
"""Seconds of one unit of the moments told: whole numbers take half the space."""
EVENTS = 6000
"""Most actions told of one timeline."""
KINDS = list(Kind)


def timeline(source: Source) -> dict[str, Any]:
    layout, every = source.run.layout, source.run.micro_batches
    schedule = make_schedule(layout.schedule, layout.pp, every, layout.vpp)
    tracks: list[dict[str, Any]] = []
    notes: list[str] = []
    plan = source.plan
    if plan is not None:
        seconds = stage_seconds(plan.question, layout)
        name = f"predicted for {plan.question.cluster.name}"
        track = _simulated("predicted", name, schedule, seconds.costs, seconds.message)
        tracks.append({**track, "bubble": plan.bubble})  # ranks that share cores wait less than the picture shows
    steps = _chosen(source)
    pipeline = list(range(0, layout.world_size, layout.world_size // layout.pp))
    found = {what: measure(source, schedule, pipeline, step) for what, step in steps.items()}
    real = {what: step for what, step in found.items() if step is not None}
    if "typical" in real:
        costs, transfer = stage_costs(schedule, real["typical"])
        name = f"simulated from the times of each stage in step {real['typical'].step}"
        tracks.append(_simulated("replayed", name, schedule, costs, transfer))
    tracks += [_measured(what, step) for what, step in real.items()]
    if source.folder is not None and not real:
        notes.append("no times were kept; train with --set output.keep_timing=true to see the real timeline")
    for track in tracks:
        shown = track["micro_batches"]
        if shown < every:
            notes.append(f"{track['label']}: {shown} of {every} micro-batches are drawn; the numbers are of all")
    return {
        "tick": TICK,
        "kinds": [kind.value for kind in KINDS],
        "schedule": layout.schedule,
        "micro_batches": every,
        "stage_rank": list(schedule.stage_rank),
        "tracks": tracks,
        "notes": notes,
    }


def _chosen(source: Source) -> dict[str, int]:
    """The step of middle length among those kept, the slowest after the first, and the last."""
    kept = set(kept_steps(source))
    rows = [row for row in source.rows if row["step"] in kept and finite(row.get("seconds")) is not None]
    rows = rows[1:] or rows
    if not rows:
        return {}
    middle = median_low([row["seconds"] for row in rows])
    found = {
        "typical": next(row["step"] for row in rows if row["seconds"] == middle),
        "slowest": max(rows, key=lambda row: row["seconds"])["step"],
        "last": rows[-1]["step"],
    }
    return {what: step for what, step in found.items() if what == "typical" or step != found["typical"]}


def _simulated(
    name: str, label: str, schedule: Schedule, costs: StageCosts, transfer: float | list[float]
) -> dict[str, Any]:
    full = simulate(schedule, costs, transfer)
    drawn, shown = full, schedule.micro_batches
    actions = sum(map(len, schedule.actions))
    if actions > EVENTS:
        per_batch = actions // schedule.micro_batches
        # Whole rounds of the pipeline, as an interleaved schedule wants them.
        shown = max(EVENTS // per_batch // schedule.ranks, 1) * schedule.ranks
        shown = min(shown, schedule.micro_batches)
        vpp = schedule.stages // schedule.ranks
        drawn = simulate(make_schedule(schedule.name, schedule.ranks, shown, vpp), costs, transfer)
    lanes: list[list[tuple[Action, float, float, float]]] = [[] for _ in range(schedule.ranks)]
    for event in drawn.events:
        lanes[event.rank].append((event.action, event.start, event.start, event.end))
    return {
        "id": name,
        "label": label,
        "bubble": full.bubble_fraction,
        "seconds": full.makespan,
        "busy": _shares(full),
        "micro_batches": shown,
        "lanes": [{"rank": rank, "events": _flat(lane)} for rank, lane in enumerate(lanes)],
    }


def _shares(full: Timeline) -> list[float]:
    return [round(1 - idle, 4) for idle in full.bubble]


def _measured(what: str, step: MeasuredStep) -> dict[str, Any]:
    span = step.makespan
    names = {"typical": f"measured, step {step.step} (of middle length)"}
    return {
        "id": f"measured-{what}",
        "label": names.get(what, f"measured, step {step.step} (the {what})"),
        "bubble": step.bubble,
        "seconds": span,
        "step_seconds": step.seconds,
        "busy": [round(sum(done.end - done.ready for done in lane) / span, 4) for lane in step.lanes.values()],
        "micro_batches": 1 + max(done.action.micro_batch for lane in step.lanes.values() for done in lane),
        "hosts": step.alignment.hosts,
        "uncertain": finite(step.alignment.uncertain),
        "lanes": [
            {"rank": rank, "events": _flat((done.action, done.start, done.ready, done.end) for done in lane)}
            for rank, lane in step.lanes.items()
        ],
    }


def _flat(events: Iterable[tuple[Action, float, float, float]]) -> list[int]:
    """Six whole numbers for each: kind, stage, micro-batch, start, input there, end."""
    found: list[int] = []
    for action, *moments in events:
        found += [KINDS.index(action.kind), action.stage, action.micro_batch, *(round(at / TICK) for at in moments)]
    return found
