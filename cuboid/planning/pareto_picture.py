"""Cost or energy of a training over its days, as an SVG picture: all options, the Pareto front and the chosen one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from cuboid.planning.pareto import Measure, TrainingOption, front
from cuboid.planning.picture import GRID, INK, text_at

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 960, 520, 84, 64, 24, 60
FRONT, OTHER, CHOSEN = "#4c78a8", "#c9c9c4", "#e45756"
MOST_NAMES = 8
"""Names beside points of the front, at most: more would hide each other."""


def svg(options: Sequence[TrainingOption], chosen: TrainingOption, title: str, measure: Measure = "cost") -> str:
    """Both axes are logarithmic."""
    priced = [option for option in options if option.of(measure)]
    days, costs = [option.days for option in priced], [option.of(measure) for option in priced]

    def along(value: float, low: float, high: float) -> float:
        return math.log(value / low) / math.log(high / low) if high > low else 0.5

    def place(option: TrainingOption) -> tuple[float, float]:
        across, up = along(option.days, min(days), max(days)), along(option.of(measure), min(costs), max(costs))
        return LEFT + across * (WIDTH - LEFT - RIGHT - 150), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    best = front(priced, measure)
    meaning = {"cost": "no other is as fast and as cheap", "energy": "no other is as fast with as few kWh"}[measure]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text_at(LEFT, 24, title, 16, "bold"),
        text_at(LEFT, 44, f"blue: {meaning}; red: chosen", 12),
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM + 10}H{WIDTH - RIGHT}" fill="none" stroke="{GRID}"/>',
    ]
    for tick in _ticks(days):
        x = LEFT + along(tick, min(days), max(days)) * (WIDTH - LEFT - RIGHT - 150)
        parts.append(text_at(x, HEIGHT - BOTTOM + 26, f"{tick:g} days", 10, anchor="middle"))
    for tick in _ticks(costs):
        y = HEIGHT - BOTTOM - along(tick, min(costs), max(costs)) * (HEIGHT - TOP - BOTTOM)
        parts.append(text_at(LEFT - 8, y + 4, f"{tick:,.0f}", 10, anchor="end"))
    parts += [_dot(place(option), option, OTHER, 3, measure) for option in priced if option not in best]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, best))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{FRONT}" stroke-width="1.5"/>')
    every = max(1, math.ceil(len(best) / MOST_NAMES))
    for number, option in enumerate(best):
        x, y = place(option)
        parts.append(_dot((x, y), option, FRONT, 4, measure))
        if number % every == 0:
            parts.append(text_at(x + 8, y - 6, f"{option.accelerators} × {option.name}", 10, fill=INK))
    if chosen.of(measure):
        parts.append(_dot(place(chosen), chosen, CHOSEN, 6, measure))
    return "\n".join([*parts, "</svg>", ""])


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten within the values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    some = [factor * 10.0**power for power in range(low, high + 1) for factor in (1, 2, 5)]
    return [tick for tick in some if min(values) <= tick <= max(values)]


def _dot(place: tuple[float, float], option: TrainingOption, fill: str, radius: int, measure: Measure) -> str:
    unit = " kWh" if measure == "energy" else ""
    where, amount = f"{option.accelerators} × {option.name}", f"{option.of(measure):,.0f}{unit}"
    tip = f"{where}: {option.days:.3g} days, {amount}, {option.layout}"
    return (
        f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{radius}" fill="{fill}"><title>{escape(tip)}</title>'
        "</circle>"
    )
