"""Rounds of islands over time: rows of text, an SVG picture, a trace for Perfetto. Two rows an island: its steps, and
below them what its thread fetches and steps with beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from cuboid.cost.rounds import Timeline
from cuboid.planning.picture import GAP, GRID, MARGIN, PALE, ROW, TOP, axis, text_at

SIGNS = {"step": "=", "encode": "e", "apply": "a", "wait": ".", "fetch": "~", "outer": "o"}
"""What fills a column of the drawing most; a blank is nothing."""
FILL = {
    "step": "#4c78a8",
    "encode": "#e45756",
    "apply": "#b279a2",
    "wait": "#f4f4f2",
    "fetch": "#eeca3b",
    "outer": "#54a24b",
}
WORDS = {
    "step": "steps",
    "encode": "encoding",
    "apply": "applying",
    "wait": "waiting",
    "fetch": "fragments on the links",
    "outer": "outer step",
}
BESIDE = ("fetch", "outer")
"""What does not stop the training."""


@dataclass(frozen=True)
class Activity:
    """What one island does from a moment to another, in seconds."""

    island: int
    kind: str
    start: float
    end: float
    what: str


def activities(timeline: Timeline) -> list[Activity]:
    """All that takes time, island after island."""
    found = []
    for island, times in enumerate(timeline.islands):

        def add(kind: str, start: float, end: float, what: str, island: int = island) -> None:
            if end > start:
                found.append(Activity(island, kind, start, end, what))

        for step, start in enumerate(timeline.starts[island][:-1]):
            add("step", start, start + times.step, f"step {step + 1}")
        for each in timeline.rounds:
            name = f"round {each.round}, fragment {each.fragment}"
            arrived, applied = each.arrived[island], each.applied[island]
            add("encode", arrived - times.encode, arrived, name)
            add("fetch", *each.fetched, name)
            add("outer", max(each.fetched[1], each.done - times.outer), each.done, name)
            add("wait", applied - times.apply - each.waited[island], applied - times.apply, name)
            add("apply", applied - times.apply, applied, name)
    return found


def draw(timeline: Timeline, names: tuple[str, ...], width: int) -> str:
    """Rows of text; each column shows what took most of its time."""
    whole = max(starts[-1] for starts in timeline.starts)
    label = max(map(len, names)) + 1
    columns = max(width - label, 10)
    held: dict[tuple[int, bool], list[dict[str, float]]] = {
        (island, beside): [{} for _ in range(columns)] for island in range(len(names)) for beside in (False, True)
    }
    for each in activities(timeline):
        row = held[each.island, each.kind in BESIDE]
        first, last = (min(int(moment / whole * columns), columns - 1) for moment in (each.start, each.end))
        for column in range(first, last + 1):
            inside = min(each.end, (column + 1) * whole / columns) - max(each.start, column * whole / columns)
            row[column][each.kind] = row[column].get(each.kind, 0.0) + inside
    lines = []
    for (island, beside), row in held.items():
        name = "" if beside else names[island]
        lines.append(name.ljust(label) + "".join(_sign(column, whole / columns) for column in row))
    return "\n".join(line.rstrip() for line in lines)


def _sign(column: dict[str, float], seconds: float) -> str:
    """Short things are shown where anything of theirs is at least a quarter."""
    if not column:
        return " "
    rare = [kind for kind in ("wait", "encode", "apply") if column.get(kind, 0.0) >= seconds / 4]
    return SIGNS[rare[0] if rare else max(column, key=lambda kind: column[kind])]


def chrome_trace(timeline: Timeline, names: tuple[str, ...], title: str) -> dict[str, Any]:
    """Load it at ui.perfetto.dev or chrome://tracing."""
    events: list[dict[str, Any]] = []
    for island, name in enumerate(names):
        own = {"ph": "M", "pid": island}
        events.append({"name": "process_name", **own, "args": {"name": f"{title}: {name}"}})
        for thread, label in enumerate(("training", "beside it")):
            events.append({"name": "thread_name", **own, "tid": thread, "args": {"name": label}})
    for each in activities(timeline):
        moments = {"ts": round(each.start * 1e6, 3), "dur": round((each.end - each.start) * 1e6, 3)}
        place = {"pid": each.island, "tid": int(each.kind in BESIDE)}
        events.append({"name": each.what, "cat": WORDS[each.kind], "ph": "X", **place, **moments})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def svg(timeline: Timeline, names: tuple[str, ...], title: str, subtitle: str) -> str:
    """The picture as text of an SVG file."""
    whole = max(starts[-1] for starts in timeline.starts)
    left = max(MARGIN, 12 + 8 * max(map(len, names)))
    inner = 1200
    scale, width, bottom = inner / whole, left + inner + 20, TOP + len(names) * 2 * (ROW + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 56}" '
        f'viewBox="0 0 {width} {bottom + 56}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<rect width="{width}" height="{bottom + 56}" fill="white"/>',
        text_at(left, 24, title, 16, "bold"),
        text_at(left, 44, subtitle, 12),
    ]
    for island, name in enumerate(names):
        y = TOP + 2 * island * (ROW + GAP)
        parts.append(text_at(left - 8, y + 15, name, 12, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{inner}" height="{ROW}" fill="{PALE}" stroke="{GRID}"/>')
    for each in activities(timeline):
        y = TOP + (2 * each.island + (each.kind in BESIDE)) * (ROW + GAP)
        tip = f"{each.what}: {WORDS[each.kind]}, {each.start:.4g} s to {each.end:.4g} s"
        size = max((each.end - each.start) * scale - 0.4, 0.3)
        parts.append(
            f'<rect x="{left + each.start * scale:.2f}" y="{y}" width="{size:.2f}" height="{ROW}" '
            f'fill="{FILL[each.kind]}"><title>{escape(tip)}</title></rect>'
        )
    parts += axis(whole, scale, bottom, left)
    x = float(left)
    for kind, word in WORDS.items():
        parts.append(f'<rect x="{x}" y="{bottom + 29}" width="14" height="14" fill="{FILL[kind]}" stroke="{GRID}"/>')
        parts.append(text_at(x + 20, bottom + 40, word, 12))
        x += 9 * len(word) + 40
    return "\n".join([*parts, "</svg>", ""])
