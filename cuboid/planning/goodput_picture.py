"""The share of the time that is training over the checkpoint interval, as an SVG picture: one colour for each size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, GRID = "#1b1b1b", "#d9d9d4"
COLOURS = ("#4c78a8", "#54a24b", "#e45756", "#b279a2", "#eeca3b", "#76b7b2")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 460, 64, 64, 270, 52
TICKS = {10: "10 s", 30: "30 s", 60: "1 min", 300: "5 min", 900: "15 min", 3600: "1 h", 14400: "4 h", 86400: "1 day"}


@dataclass(frozen=True)
class Line:
    label: str
    colour: int
    """Number of the size it belongs to."""
    dashed: bool
    shares: Sequence[float]
    """At each interval; not a number where nothing is to be drawn."""
    best: tuple[float, float]
    """Interval and share of the dot."""


def svg(intervals: Sequence[float], lines: Sequence[Line], title: str, subtitle: str) -> str:
    """The picture as text of an SVG file."""
    low = min(share for line in lines for share in line.shares if not math.isnan(share))
    floor = max(0.0, math.floor(10 * low) / 10)

    def place(interval: float, share: float) -> tuple[float, float]:
        first, last = math.log(intervals[0]), math.log(intervals[-1])
        across = (math.log(interval) - first) / (last - first)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + (1 - share) / (1 - floor) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, 16, weight="bold"),
        _text(LEFT, 44, subtitle, 12),
    ]
    for tenth in range(round(10 * floor), 11):
        _, y = place(intervals[0], tenth / 10)
        parts.append(_rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 8, y + 4, f"{10 * tenth} %", 11, anchor="end"))
    for seconds, label in TICKS.items():
        if intervals[0] <= seconds <= intervals[-1]:
            x, _ = place(seconds, 1.0)
            parts.append(_rule(x, TOP, x, HEIGHT - BOTTOM))
            parts.append(_text(x, HEIGHT - BOTTOM + 16, label, 11, anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "between checkpoints on disk", 12, anchor="middle"))
    for number, line in enumerate(lines):
        colour = COLOURS[line.colour % len(COLOURS)]
        points = [
            place(interval, share)
            for interval, share in zip(intervals, line.shares, strict=True)
            if not math.isnan(share) and share >= floor
        ]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = place(*line.best)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        y = TOP + 12 + 34 * number
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 16}" y1="{y - 4}" x2="{WIDTH - RIGHT + 44}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(_text(WIDTH - RIGHT + 52, y, line.label, 12))
    return "\n".join([*parts, "</svg>", ""])


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}" stroke-width="0.7"/>'


def _text(x: float, y: float, text: str, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
