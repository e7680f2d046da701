"""A run in a terminal of 80 × 24: progress, numbers, the loss, the pipeline's lanes and memory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rich.text import Text

from cuboid.planning.plan import GIB
from cuboid.planning.refine import stage_seconds
from cuboid.report.live import Watched
from cuboid.report.measured import MeasuredStep
from cuboid.report.source import buckets, finite, thinned
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import simulate
from cuboid.schedule.table import Kind
from cuboid.spec.ranks import coordinates

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {Kind.FORWARD: "blue", Kind.BACKWARD: "green", Kind.INPUT: "cyan", Kind.WEIGHT: "yellow"}
WARNING_LINES = 6
Lane = list[tuple[Kind, float, float]]


def frame(watched: Watched, width: int, height: int) -> Text:
    """As many lines as fit; what matters most stands first."""
    state = watched.state()
    lines = [*_head(state, width), *_numbers(state), *_warnings(state, width), *_losses(watched, width)]
    room = height - len(lines) - 1
    memory = _memory(watched, width)
    lanes = _lanes(watched, width, room - min(len(memory), max(room // 2, 3)))
    lines += [*lanes, *memory[: room - len(lanes)]]
    text = Text("\n").join(lines[: height - 1])
    text.no_wrap = True
    return text


def line(state: dict[str, Any]) -> str:
    """The state as one line, for an output that is no terminal."""
    step, steps = state["step"], state["steps"]
    parts = [f"step {step:>{len(str(steps))}}/{steps}", f"loss {_number(state['loss'], '.4f')}"]
    parts += [f"norm {_number(state['gradient_norm'], '.3f')}", f"lr {_number(state['learning_rate'], '.2e')}"]
    parts += [f"{_number(state['tokens_per_second'], ',.0f')} tokens/s", f"left {_duration(state['seconds_left'])}"]
    if state["largest_load"] is not None:
        parts.append(_experts(state))
    return "  ".join([*parts, state["status"]])


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The middle value of every bucket as a bar of one of eight heights; blanks where there is none."""
    middles = thinned(values, buckets(len(values), width))["middle"] if values else []
    known = [value for value in middles if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BLOCKS[round((value - low) * scale)] for value in middles)


def bar(share: float, width: int) -> str:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def _head(state: dict[str, Any], width: int) -> list[Text]:
    share = state["step"] / state["steps"]
    tail = f" {state['step']}/{state['steps']} steps, {_duration(state['seconds_left'])} left"
    colour = {"running": "green", "finished": "bold green", "stopped": "red"}[state["status"]]
    title = Text(f"{state['model']}  {state['layout']}"[: width - 11], "bold")
    title.append(f"  {state['status']}", colour)
    return [title, Text.assemble((bar(share, max(width - len(tail), 10)), "cyan"), tail)]


def _numbers(state: dict[str, Any]) -> list[Text]:
    used = _number(state["mfu"], ".1%")
    peak = state["memory_peak_bytes"]
    held = f"{peak / GIB:.2f} GiB" if peak else "–"
    first = f"{_number(state['tokens_per_second'], ',.0f')} tokens/s   step {_number(state['step_seconds'], '.3g')} s"
    failed = f"   failures {state['failures']}" if state["failures"] else ""
    routed = [Text(_experts(state))] if state["largest_load"] is not None else []
    return [Text(f"{first}   MFU {used}   fullest rank {held}{failed}"), *routed, Text("")]


def _experts(state: dict[str, Any]) -> str:
    told = f"busiest expert {state['largest_load']:.2f} × the mean (layer {state['busiest_layer']})"
    return f"{told}   dead experts {state['dead_experts']}"


def _warnings(state: dict[str, Any], width: int) -> list[Text]:
    """What the run said of its health, the newest first."""
    told = [line for warning in reversed(state["warnings"]) for line in textwrap.wrap(f"⚠ {warning}", width)]
    return [Text(line, "yellow") for line in [*told[:WARNING_LINES], *([""] if told else [])]]


def _losses(watched: Watched, width: int) -> list[Text]:
    values = [finite(row.get("loss")) for row in watched.rows]
    known = [value for value in values if value is not None]
    if not known:
        return [Text("no step has ended yet", "dim"), Text("")]
    label = f"loss {known[0]:.3f} → {known[-1]:.3f} "
    return [Text.assemble(label, (sparkline(values, max(width - len(label), 8)), "magenta")), Text("")]


def _lanes(watched: Watched, width: int, room: int) -> list[Text]:
    """One line per pipeline rank: letters say what it did, dots that it waited."""
    found, title = _pipeline(watched)
    if not found or room < 3:
        return []
    span = max(end for lane in found.values() for _, _, end in lane)
    margin = len(f"rank {max(found)} ")
    lines = [Text(title[:width], "dim")]
    for rank, lane in list(found.items())[: room - 2]:
        lines.append(Text.assemble((f"{f'rank {rank}':<{margin}}", "dim"), drawn(lane, span, width - margin)))
    if len(found) > room - 2:
        lines[-1] = Text(f"… {len(found) - room + 3} more ranks", "dim")
    return [*lines, Text("")]


def drawn(lane: Lane, span: float, width: int) -> Text:
    """Each column shows what took most of its time."""
    text = Text()
    for column in range(width):
        low, high = column * span / width, (column + 1) * span / width
        inside = [(min(end, high) - max(start, low), kind) for kind, start, end in lane if start < high and end > low]
        share, kind = max(inside, key=lambda entry: entry[0], default=(0.0, Kind.FORWARD))
        busy = sum(part for part, _ in inside) > (high - low) / 2
        text.append(kind.value if busy and share else "·", STYLES[kind] if busy and share else "dim")
    return text


def _pipeline(watched: Watched) -> tuple[dict[int, Lane], str]:
    """The newest real step, else the planner's."""
    measured: MeasuredStep | None = watched.last_pipeline()
    if measured is not None:
        lanes = {
            rank: [(done.action.kind, done.ready, done.end) for done in lane] for rank, lane in measured.lanes.items()
        }
        return lanes, f"pipeline of step {measured.step}, {measured.makespan:.3g} s, bubble {measured.bubble:.1%}"
    run, plan = watched.source.run, watched.source.plan
    if plan is None or run.layout.pp == 1:
        return {}, ""
    seconds = stage_seconds(plan.question, run.layout)
    schedule = make_schedule(run.layout.schedule, run.layout.pp, run.micro_batches, run.layout.vpp)
    timeline = simulate(schedule, seconds.costs, seconds.message)
    stride = run.layout.world_size // run.layout.pp
    predicted: dict[int, Lane] = {stride * rank: [] for rank in range(run.layout.pp)}
    for event in timeline.events:
        predicted[stride * event.rank].append((event.action.kind, event.start, event.end))
    return predicted, f"pipeline as predicted (output.keep_timing shows the real one), bubble {plan.bubble:.1%}"


def _memory(watched: Watched, width: int) -> list[Text]:
    """The fullest rank of every stage, against its accelerator's memory."""
    layout, rows = watched.source.run.layout, watched.source.memory
    if not rows:
        return []
    fullest: dict[int, float] = {}
    for rank, row in rows.items():
        stage = coordinates(rank, layout).pp
        fullest[stage] = max(fullest.get(stage, 0.0), row["peak"])
    cluster = watched.source.cluster
    limit = cluster.memory_gib * GIB if cluster else max(fullest.values())
    lines = [Text(f"memory, of {limit / GIB:.3g} GiB" if cluster else "memory", "dim")]
    for stage, peak in sorted(fullest.items()):
        tail = f" {peak / GIB:.2f} GiB"
        name = f"pp {stage} "
        lines.append(Text.assemble((name, "dim"), (bar(peak / limit, width - len(name) - len(tail)), "blue"), tail))
    return lines


def _number(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else str(timedelta(seconds=round(seconds)))
