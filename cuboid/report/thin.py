"""Long series made short without hiding anything: of every bucket of steps the lowest, the middle and the highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Any

POINTS = 1500
"""More than a screen has columns for."""


def finite(value: Any) -> float | None:
    """Numbers as they are, anything else as nothing."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and math.isfinite(value) else None


def buckets(count: int, points: int = POINTS) -> list[range]:
    """Positions 0 to count - 1 in at most so many runs, of one position each where there are few."""
    size = max(1, math.ceil(count / points))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def thinned(values: Sequence[float | None], parts: list[range]) -> dict[str, list[float | None]]:
    """`middle` is a value that was there; `low` and `high` only where buckets hold several."""
    middle: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for part in parts:
        known = [value for index in part if (value := values[index]) is not None]
        middle.append(short(median_low(known)) if known else None)
        low.append(short(min(known)) if known else None)
        high.append(short(max(known)) if known else None)
    if all(len(part) == 1 for part in parts):
        return {"middle": middle}
    return {"middle": middle, "low": low, "high": high}


def short(value: float) -> float:
    """Six figures: more than anyone can see, in half the space."""
    return value if isinstance(value, int) else float(f"{value:.6g}")
