"""When every stage does what with every micro-batch: as predicted, as simulated from measured times, and as it was; for
the page, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import Any

from cuboid.errors import UserError
from cuboid.planning.choose import pipeline_seconds
from cuboid.planning.picture import NAMES
from cuboid.report.measured import MeasuredStep, kept_steps, measure, measure_all, stage_costs
from cuboid.report.source import Source, finite
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, Timeline, simulate
from cuboid.schedule.table import Action, Kind, Schedule
from cuboid.spec.ranks import coordinates

TICK = 1e-7
"""Seconds of one unit of the moments told: whole numbers take half the space."""
EVENTS = 6000
"""Most actions told of one timeline."""
KINDS = list(Kind)


def timeline(source: Source) -> dict[str, Any]:
    layout, every = source.run.layout, source.run.micro_batches_of(0)
    schedule = make_schedule(layout.schedule, layout.pp, every, layout.vpp)
    tracks: list[dict[str, Any]] = []
    notes: list[str] = []
    plan = source.plan
    if plan is not None:
        seconds = pipeline_seconds(plan.question, layout)
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
    grown = source.run.training.global_batch * source.run.training.sequence  # not of a batch ramp
    rows = [row for row in rows[1:] or rows if row.get("tokens", grown) == grown]
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
        "busy": _busy(full),
        "micro_batches": shown,
        "lanes": [{"rank": rank, "events": _flat(lane)} for rank, lane in enumerate(lanes)],
    }


def _busy(full: Timeline) -> list[float]:
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


STEPS = 20
"""Steps put into a trace unless asked otherwise: the newest."""
SIMULATED, PREDICTED = 1_000_000, 1_000_001
"""Process numbers beyond those of hosts."""


def merged_trace(source: Source, steps: int = STEPS) -> dict[str, Any]:
    """Every rank's actions of the newest steps, a process per host, beside the same schedule simulated from the times
    the stages really took, and as the planner foresaw it."""
    run = source.run
    layout = run.layout
    schedule = make_schedule(layout.schedule, layout.pp, run.micro_batches, layout.vpp)
    events: list[dict[str, Any]] = []
    found = [step for number in kept_steps(source)[-steps:] if (step := measure_all(source, schedule, number))]
    if source.folder is not None and not found:
        raise UserError(f"{source.folder} has kept no times; train with --set output.keep_timing=true")
    begin = min((step.begin for step in found), default=0.0)
    hosts: dict[str, int] = {}
    for step in found:
        for rank, lane in step.lanes.items():
            process = hosts.setdefault(step.hosts[rank], len(hosts))
            moved = step.begin - begin
            for done in lane:
                if done.ready > done.start:
                    events.append(_event("wait", "wait", process, rank, done.start + moved, done.ready + moved))
                args = {**_args(done.action), "step": step.step, "waited_us": _us(done.ready - done.start)}
                events.append(_action(done.action, process, rank, done.ready + moved, done.end + moved, args))
            for wait in step.collectives[rank]:
                name = f"{wait.kind} {wait.group}".strip()
                events.append(_event(name, "collective", process, rank, wait.start + moved, wait.end + moved))
    for host, process in hosts.items():
        events.append(_named("process_name", process, 0, f"measured on {host or 'this host'}"))
    for rank, host in sorted({(rank, step.hosts[rank]) for step in found for rank in step.lanes}):
        place = coordinates(rank, layout)
        name = f"rank {rank} (pp {place.pp}, dp {place.dp}, tp {place.tp})"
        events.append(_named("thread_name", hosts[host], rank, name))
    if found:
        first = found[0].pipeline(layout.world_size // layout.pp)
        own = make_schedule(layout.schedule, layout.pp, run.micro_batches_of(0), layout.vpp)
        simulated = simulate(own, *stage_costs(own, first))
        events += _simulated_events(simulated, SIMULATED, f"simulated from the times of step {first.step}")
    if source.plan is not None:
        seconds = pipeline_seconds(source.plan.question, layout)
        name = f"predicted for {source.plan.question.cluster.name}"
        events += _simulated_events(simulate(schedule, seconds.costs, seconds.message), PREDICTED, name)
    told = {"steps": [step.step for step in found], "clocks_uncertain_us": [_uncertain(step) for step in found]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _uncertain(step: MeasuredStep) -> float | None:
    return None if step.alignment.uncertain == float("inf") else _us(step.alignment.uncertain)


def _simulated_events(timeline: Timeline, process: int, name: str) -> list[dict[str, Any]]:
    found = [_named("process_name", process, 0, name)]
    for rank in range(timeline.schedule.ranks):
        found.append(_named("thread_name", process, rank, f"pipeline rank {rank}"))
    for event in timeline.events:
        found.append(_action(event.action, process, event.rank, event.start, event.end, _args(event.action)))
    return found


def _args(action: Action) -> dict[str, Any]:
    return {"stage": action.stage, "micro_batch": action.micro_batch, "kind": NAMES[action.kind]}


def _action(
    action: Action, process: int, thread: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {**_event(str(action), NAMES[action.kind], process, thread, start, end), "args": args}


def _event(name: str, category: str, process: int, thread: int, start: float, end: float) -> dict[str, Any]:
    moments = {"ts": _us(start), "dur": _us(end - start)}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **moments}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
