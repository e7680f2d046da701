"""A simulated step as a trace of Chrome and Perfetto, and as an SVG picture: time runs to the right, one row per
pipeline rank."""

from typing import Any
from xml.sax.saxutils import escape

from cuboid.schedule.simulate import Event, Timeline
from cuboid.schedule.table import Kind

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}


def chrome_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """Load it at ui.perfetto.dev or chrome://tracing."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}},
        *(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
            for rank in range(timeline.schedule.ranks)
        ),
    ]
    for event in timeline.events:
        action = event.action
        events.append(
            {
                "name": str(action),
                "cat": NAMES[action.kind],
                "ph": "X",
                "pid": 0,
                "tid": event.rank,
                "ts": round(event.start * 1e6, 3),
                "dur": round((event.end - event.start) * 1e6, 3),
                "args": {"stage": action.stage, "micro_batch": action.micro_batch, "kind": NAMES[action.kind]},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


FILL = {Kind.FORWARD: "#4c78a8", Kind.BACKWARD: "#54a24b", Kind.INPUT: "#76b7b2", Kind.WEIGHT: "#eeca3b"}
SECOND = {Kind.FORWARD: "#9ecae9", Kind.BACKWARD: "#b8e0a8", Kind.INPUT: "#c3e5e2", Kind.WEIGHT: "#f9ecb4"}
"""Paler, for every other stage of a rank that holds several."""
INK, PALE, GRID = "#1b1b1b", "#f4f4f2", "#c9c9c4"
MARGIN, TOP, ROW, GAP = 70, 64, 22, 4


def svg(timeline: Timeline, title: str, subtitle: str = "") -> str:
    """The picture as text of an SVG file; as wide as shows the numbers, within reason."""
    schedule = timeline.schedule
    width = _width(timeline)
    inner = width - MARGIN - 20
    scale = inner / timeline.makespan if timeline.makespan else 0.0
    bottom = TOP + schedule.ranks * (ROW + GAP)
    used = [kind for kind in Kind if any(event.action.kind is kind for event in timeline.events)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 56}" '
        f'viewBox="0 0 {width} {bottom + 56}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<rect width="{width}" height="{bottom + 56}" fill="white"/>',
        text_at(MARGIN, 24, title, 16, "bold"),
        text_at(MARGIN, 44, subtitle, 12),
    ]
    for rank in range(schedule.ranks):
        y = TOP + rank * (ROW + GAP)
        parts.append(text_at(MARGIN - 8, y + 15, f"rank {rank}", 12, anchor="end"))
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="{inner}" height="{ROW}" fill="{PALE}"/>')
    chunk = {stage: schedule.stages_of(rank).index(stage) for stage, rank in enumerate(schedule.stage_rank)}
    parts += [_rectangle(event, chunk[event.action.stage], scale) for event in timeline.events]
    parts += axis(timeline.makespan, scale, bottom)
    parts += _legend(used, schedule.stages > schedule.ranks, bottom + 40)
    return "\n".join([*parts, "</svg>", ""])


def _width(timeline: Timeline) -> int:
    shortest = min((event.end - event.start for event in timeline.events if event.end > event.start), default=0.0)
    wanted = 18 * timeline.makespan / shortest if shortest else 0.0
    return int(min(max(wanted, 1100), 3000)) + MARGIN + 20


def _rectangle(event: Event, chunk: int, scale: float) -> str:
    kind, batch = event.action.kind, event.action.micro_batch
    x, y = MARGIN + event.start * scale, TOP + event.rank * (ROW + GAP)
    width = (event.end - event.start) * scale
    fill = (SECOND if chunk % 2 else FILL)[kind]
    tip = f"{event.action}: {NAMES[kind]} of stage {event.action.stage}, micro-batch {batch}"
    rectangle = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.4, 0.2):.2f}" height="{ROW}" fill="{fill}">'
        f"<title>{escape(tip)}, {event.start:.4g} s to {event.end:.4g} s</title></rect>"
    )
    label = str(batch)
    if width < 7 * len(label) + 2:
        return rectangle
    ink = INK if chunk % 2 or kind is Kind.WEIGHT else "white"
    return rectangle + text_at(x + width / 2, y + 15, label, 11, anchor="middle", fill=ink)


def text_at(
    x: float, y: float, text: str, size: int, weight: str = "normal", anchor: str = "start", fill: str = INK
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(text)}</text>'


def axis(makespan: float, scale: float, bottom: int, left: float = MARGIN) -> list[str]:
    """A line with a handful of round times on it."""
    if not makespan:
        return []
    step = 10.0 ** int(f"{makespan / 8:e}".split("e")[1])
    step = next(step * factor for factor in (1, 2, 5, 10) if makespan / (step * factor) <= 10)
    parts = []
    for tick in range(int(makespan / step) + 1):
        x = left + tick * step * scale
        parts.append(
            f'<line x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{bottom}" stroke="{GRID}" stroke-width="0.5"/>'
        )
        parts.append(text_at(x, bottom + 12, f"{tick * step:.4g} s", 10, anchor="middle"))
    return parts


def _legend(kinds: list[Kind], several: bool, y: int) -> list[str]:
    parts, x = [], float(MARGIN)
    for kind in kinds:
        parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{FILL[kind]}"/>')
        if several:
            parts.append(f'<rect x="{x + 14}" y="{y - 11}" width="14" height="14" fill="{SECOND[kind]}"/>')
        x += 34 if several else 20
        parts.append(text_at(x, y, f"{kind.value} {NAMES[kind]}", 12))
        x += 9 * len(NAMES[kind]) + 20
    note = "pale: every other stage of the rank; " if several else ""
    return [*parts, text_at(x, y, f"{note}numbers: micro-batches; blank: idle", 12)]
