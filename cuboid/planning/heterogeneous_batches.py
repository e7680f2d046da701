"""How the micro-batches of a job are divided between lines of replicas of different speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from cuboid.planning.heterogeneous_divisions import FEW

NEAR = 2
"""For each line the number of micro-batches by its speed is tried, and so many below and above it."""


def share_out(
    whole: int, replicas: Sequence[int], fills: Sequence[float], slopes: Sequence[float], equal: bool = False
) -> list[int] | None:
    """Micro-batches of a replica of each line, so that the last line finishes soonest; None where they do not divide.

    >>> share_out(12, [1, 1], [0.0, 0.0], [1.0, 2.0])
    [8, 4]

    `fills`: seconds until the first micro-batch of a line is done, less `slopes`: its seconds of each micro-batch.
    `equal`: all lines must have equally many."""
    total = sum(replicas)
    if whole % total == 0 and (equal or len(replicas) == 1):
        return [whole // total] * len(replicas)
    if equal:
        return None
    # Bisect the time at which all lines finish together; the last line gets the rest, if it divides.
    low, high = 0.0, max(fill + slope * whole for fill, slope in zip(fills, slopes, strict=True))
    for _ in range(60):
        middle = (low + high) / 2
        done = sum(
            count * max(middle - fill, 0.0) / slope for count, fill, slope in zip(replicas, fills, slopes, strict=True)
        )
        low, high = (low, middle) if done >= whole else (middle, high)
    wanted = [max(1, round((high - fill) / slope)) for fill, slope in zip(fills, slopes, strict=True)]
    spread = NEAR if len(replicas) <= FEW else 0
    spread = max(spread, replicas[-1]) if len(replicas) == 2 else spread
    best: tuple[float, list[int]] | None = None
    for some in product(*(range(max(1, each - spread), each + spread + 1) for each in wanted[:-1])):
        left = whole - sum(count * each for count, each in zip(replicas, some, strict=False))
        if left < replicas[-1] or left % replicas[-1]:
            continue
        counts = [*some, left // replicas[-1]]
        seconds = max(fill + slope * each for fill, slope, each in zip(fills, slopes, counts, strict=True))
        if best is None or seconds < best[0]:
            best = seconds, counts
    if best is None and whole % total == 0:
        return [whole // total] * len(replicas)
    return best[1] if best else None
