"""A run while it is in flight, read again and again, each time only what is new; drawn in a terminal of 80 × 24."""

from __future__ import annotations

import fcntl
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rich.text import Text

from cuboid.errors import UserError, printable
from cuboid.planning.choose import pipeline_seconds
from cuboid.planning.plan import GIB
from cuboid.readers import LARGEST, Missing, plain_file
from cuboid.report.islands import island_line, islands
from cuboid.report.measured import MeasuredStep, kept_steps, measure
from cuboid.report.metrics import busiest
from cuboid.report.source import Source, buckets, finite, open_source, thinned, told
from cuboid.report.summary import utilization
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import simulate
from cuboid.schedule.table import Kind
from cuboid.spec.ranks import coordinates
from cuboid.telemetry.rows import Row, parse_metric_rows

RECENT = 50
"""Steps from which speed and the time left are taken."""


@dataclass
class Watched:
    source: Source
    rows: list[Row] = field(default_factory=list)
    _read: int = 0
    _last: bytes = b""

    @classmethod
    def open(cls, path: str | Path, cluster: str = "") -> Watched:
        source = open_source(path, cluster)
        if source.folder is None:
            raise UserError(f"{path} is a plan, not a run; name the folder of a run, or use cuboid report {path}")
        return cls(source)

    @property
    def folder(self) -> Path:
        assert self.source.folder is not None
        return self.source.folder

    def refresh(self) -> int:
        """Reads on where it stopped; how many steps are new. A shorter file is one that a restart has begun anew."""
        path = self.folder / "metrics.jsonl"
        try:
            with plain_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except Missing:
            size = 0
        if size < self._read or not self._continues(path):
            self.rows, self._read, self._last = [], 0, b""
        before = len(self.rows)
        if size > self._read:
            with plain_file(path) as file:
                file.seek(self._read)
                text = file.read(LARGEST)
            whole = text[: text.rfind(b"\n") + 1]
            lines = whole.splitlines(keepends=True)
            self._read, self._last = self._read + len(whole), (lines or [self._last])[-1]
            self.rows += parse_metric_rows(path, whole)
        self.source = Source(self.source.run, self.folder, self.source.cluster_name)  # forgets what it has read
        return max(0, len(self.rows) - before)

    def _continues(self, path: Path) -> bool:
        """Whether what was read is still there: a run that resumes from a checkpoint drops the rows it will redo."""
        if not self._read:
            return True
        with plain_file(path) as file:
            file.seek(self._read - len(self._last))
            return file.read(len(self._last)) == self._last

    @property
    def is_running(self) -> bool:
        """Whether somebody holds the claim on the folder; on file systems without locks nobody can tell, so yes."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def state(self) -> dict[str, Any]:
        """What there is to say now."""
        run, rows = self.source.run, self.rows
        last: Row = rows[-1] if rows else {}
        recent = [value for row in rows[1:][-RECENT:] or rows if (value := finite(row.get("seconds")))]
        each = median(recent) if recent else None
        done, training = int(last.get("step", 0)), run.training
        newest = training.batch_sizes.at(max(0, done - 1))  # sequences of the last batch
        tokens = newest * training.sequence
        left = max(0, training.batch_sizes.sum_before(training.steps) - training.batch_sizes.sum_before(done))
        return {
            "folder": str(self.folder),
            "model": run.model.name,
            "layout": str(run.layout),
            "step": done,
            "steps": run.training.steps,
            "status": self._status(done),
            "loss": finite(last.get("loss")),
            "learning_rate": finite(last.get("learning_rate")),
            "gradient_norm": finite(last.get("gradient_norm")),
            "step_seconds": each,
            "tokens_per_second": tokens / each if each else None,
            "mfu": utilization(self.source, tokens / each) if each else None,
            "seconds_left": left / newest * each if each else None,
            "memory_peak_bytes": max((row["peak"] for row in self.source.memory.values()), default=None),
            "failures": len(self.source.failures),
            **busiest(last, run),
            "islands": islands(self.source),
            "warnings": told(rows),
        }

    def _status(self, done: int) -> str:
        if done >= self.source.run.training.steps:
            return "finished"
        return "running" if self.is_running else "stopped"

    def last_pipeline(self) -> MeasuredStep | None:
        """The newest step of which the first pipeline has kept its times."""
        run = self.source.run
        layout = run.layout
        steps = kept_steps(self.source)
        schedule = make_schedule(layout.schedule, layout.pp, run.micro_batches_of(0), layout.vpp)
        ranks = list(range(0, layout.world_size, layout.world_size // layout.pp))
        for step in steps[-1:-4:-1]:  # the newest may not be written by all of them yet
            if found := measure(self.source, schedule, ranks, step):
                return found
        return None


BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {Kind.FORWARD: "blue", Kind.BACKWARD: "green", Kind.INPUT: "cyan", Kind.WEIGHT: "yellow"}
WARNING_LINES = 6
ISLAND_LINES = 6
Lane = list[tuple[Kind, float, float]]


def frame(watched: Watched, width: int, height: int) -> Text:
    """As many lines as fit; what matters most stands first."""
    state = watched.state()
    lines = [
        *_head(state, width),
        *_numbers(state),
        *_islands(state),
        *_warnings(state, width),
        *_losses(watched, width),
    ]
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
    if state["islands"]:
        parts.append(f"{len(state['islands'])} islands, lag {max(each['lag'] for each in state['islands'])}")
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


def bar(fraction: float, width: int) -> str:
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def _head(state: dict[str, Any], width: int) -> list[Text]:
    fraction = state["step"] / state["steps"]
    tail = f" {state['step']}/{state['steps']} steps, {_duration(state['seconds_left'])} left"
    colour = {"running": "green", "finished": "bold green", "stopped": "red"}[state["status"]]
    title = Text(printable(f"{state['model']}  {state['layout']}")[: width - 11], "bold")
    title.append(f"  {state['status']}", colour)
    return [title, Text.assemble((bar(fraction, max(width - len(tail), 10)), "cyan"), tail)]


def _numbers(state: dict[str, Any]) -> list[Text]:
    used = _number(state["mfu"], ".1%")
    peak = state["memory_peak_bytes"]
    held = f"{peak / GIB:.2f} GiB" if peak else "–"
    first = f"{_number(state['tokens_per_second'], ',.0f')} tokens/s   step {_number(state['step_seconds'], '.3g')} s"
    failed = f"   failures {state['failures']}" if state["failures"] else ""
    routed = [Text(_experts(state))] if state["largest_load"] is not None else []
    return [Text(f"{first}   MFU {used}   fullest rank {held}{failed}"), *routed, Text("")]


def _islands(state: dict[str, Any]) -> list[Text]:
    """Those furthest behind, where there are many."""
    told = state["islands"] or []
    shown = sorted(told, key=lambda each: -each["lag"])[:ISLAND_LINES]
    lines = [Text(printable(island_line(each))) for each in sorted(shown, key=lambda each: int(each["island"]))]
    more = [Text(f"… {len(told) - len(shown)} more islands", "dim")] if len(told) > len(shown) else []
    return [*lines, *more, Text("")] if told else []


def _experts(state: dict[str, Any]) -> str:
    told = f"busiest expert {state['largest_load']:.2f} × the mean (layer {state['busiest_layer']})"
    return f"{told}   dead experts {state['dead_experts']}"


def _warnings(state: dict[str, Any], width: int) -> list[Text]:
    """What the run said of its health, the newest first."""
    told = [line for warning in reversed(state["warnings"]) for line in textwrap.wrap(printable(f"⚠ {warning}"), width)]
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
        fraction, kind = max(inside, key=lambda entry: entry[0], default=(0.0, Kind.FORWARD))
        busy = sum(part for part, _ in inside) > (high - low) / 2
        text.append(kind.value if busy and fraction else "·", STYLES[kind] if busy and fraction else "dim")
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
    seconds = pipeline_seconds(plan.question, run.layout)
    schedule = make_schedule(run.layout.schedule, run.layout.pp, run.micro_batches_of(0), run.layout.vpp)
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
    if seconds is None or seconds > timedelta.max.total_seconds():
        return "–"
    return str(timedelta(seconds=round(seconds)))
