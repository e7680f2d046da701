"""Simulated and measured steps in one trace for Perfetto or chrome://tracing, on one clock."""

from __future__ import annotations

from typing import Any

from cuboid.errors import UserError
from cuboid.planning.refine import stage_seconds
from cuboid.planning.trace import NAMES
from cuboid.report.measured import MeasuredStep, kept_steps, measure_all, stage_costs
from cuboid.report.source import Source
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import Timeline, simulate
from cuboid.schedule.table import Action
from cuboid.spec.ranks import coordinates

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
        simulated = simulate(schedule, *stage_costs(schedule, first))
        events += _simulated(simulated, SIMULATED, f"simulated from the times of step {first.step}")
    if source.plan is not None:
        seconds = stage_seconds(source.plan.question, layout)
        name = f"predicted for {source.plan.question.cluster.name}"
        events += _simulated(simulate(schedule, seconds.costs, seconds.message), PREDICTED, name)
    told = {"steps": [step.step for step in found], "clocks_uncertain_us": [_uncertain(step) for step in found]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _uncertain(step: MeasuredStep) -> float | None:
    return None if step.alignment.uncertain == float("inf") else _us(step.alignment.uncertain)


def _simulated(timeline: Timeline, process: int, name: str) -> list[dict[str, Any]]:
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
