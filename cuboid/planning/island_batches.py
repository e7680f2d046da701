"""How a batch is shared out between islands: equally, or by their speeds."""

from __future__ import annotations

from collections.abc import Sequence

MOST_PARTS = 32
"""Into which a batch is divided between islands of different speeds."""
NEAR = 1.05
"""Times the shortest step: what is as good."""


def share(global_batch: int, count: int) -> int:
    """The batch of one of `count` islands: where that is no whole number, a round one near it."""
    if global_batch % count == 0:
        return global_batch // count
    exact = global_batch / count
    step = max(1, 1 << max(0, int(exact).bit_length() - 4))
    return max(step, round(exact / step) * step)


def weights_by_speed(global_batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """What part of a batch each island takes so that no one waits for long: of those as good as the best the one with
    the roundest parts, as layouts divide these."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for parts in range(len(speeds), max(len(speeds), min(MOST_PARTS, global_batch)) + 1):
        if global_batch % parts and parts > len(speeds):
            continue
        weights = _divided(parts, speeds)
        longest = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
        found.append((longest / parts, weights))
    shortest = min(seconds for seconds, _ in found)
    good = [weights for seconds, weights in found if seconds <= NEAR * shortest]
    return max(good, key=lambda weights: _roundness(share(global_batch, sum(weights))))


def _divided(parts: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Each part to whoever is done with it first."""
    weights = [1] * len(speeds)
    for _ in range(parts - len(speeds)):
        first = min(range(len(speeds)), key=lambda each: (weights[each] + 1) / speeds[each])
        weights[first] += 1
    return tuple(weights)


def _roundness(size: int) -> tuple[int, int]:
    """How often two divides it; then how large it is."""
    return size & -size, size
