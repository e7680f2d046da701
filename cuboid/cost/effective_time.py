"""How much of the time is training when machines fail: a closed form, and the checkpoint interval that makes it most.

A failure ends the work since the newest checkpoint that was whole. With failures at random moments, λ = 1 / mean time
between them, an interval τ of training, a stall s for each checkpoint, a write of w seconds behind the training's back,
and R seconds until training continues,

    share = τ λ e^(-λ (R + w)) / (e^(λ (τ + s)) - 1)

is exact: between two failures, exponential time 1/λ passes and recovery takes (e^(λR) - 1)/λ, because it can fail too;
the j-th checkpoint counts if nothing fails for j (τ + s) + w seconds. For small λ the best τ is √(2 s / λ), as Young
and Daly found. Copies in memory are a second level of the same kind inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class MemoryCopies:
    """Checkpoints kept in the memory of this node and of a peer."""

    every: float = 30.0
    """Seconds of training from one to the next."""
    stall: float = 0.2
    write: float = 2.0
    """Until the peer has it."""
    load: float = 5.0
    survives: float = 0.9
    """Share of failures that leave one of the two copies."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What saving and failing cost, in seconds."""

    stall: float = 1.0
    """How long training waits for a checkpoint."""
    write: float = 67.0
    """From then until it is whole on disk."""
    detect: float = 30.0
    restart: float = 180.0
    """From the failure known to ranks that can load: ending what is left, starting processes, joining, compiling."""
    load: float = 60.0
    memory: MemoryCopies | None = None

    @property
    def recovery(self) -> float:
        """From a failure until training continues from disk."""
        return self.detect + self.restart + self.load

    @property
    def shortest_interval(self) -> float:
        """One save is written at a time."""
        return max(self.write - self.stall, 1.0)

    @property
    def on_disk_only(self) -> Costs:
        return replace(self, memory=None)


@dataclass(frozen=True)
class PublishedFailures:
    """Mean hours between failures that cost a restart, at sizes that were measured."""

    source: str
    measured: tuple[tuple[int, float], ...]
    """Accelerators, hours; smaller sizes first."""

    def seconds(self, accelerators: int) -> float:
        """Between two sizes along the line in logarithms; beyond them every accelerator fails as often as there."""
        points = self.measured
        for (small, long), (large, short) in pairwise(points):
            if small <= accelerators <= large:
                power = math.log(long / short) / math.log(large / small)
                return HOUR * long * math.pow(small / accelerators, power)
        near, hours = points[0] if accelerators < points[0][0] else points[-1]
        return HOUR * hours * near / accelerators


PUBLISHED = {
    "llama3": PublishedFailures(
        "Llama 3 405B: 419 unplanned interruptions in 54 days on 16,384 H100", ((16384, 54 * 24 / 419),)
    ),
    "rsc": PublishedFailures(
        "Meta RSC-1, arXiv 2410.21680: 7.9 h at 1,024 A100, 1.8 h at 16,384", ((1024, 7.9), (16384, 1.8))
    ),
}


def effective_share(mtbf: float, interval: float, costs: Costs) -> float:
    """Share of the time in which training gets on; `mtbf` and `interval` in seconds."""
    rate, speed = 1 / mtbf, 1.0
    memory = costs.memory
    from_disk = rate
    if memory is not None:
        from_memory = rate * memory.survives
        from_disk = rate - from_memory
        recovery = costs.detect + costs.restart + memory.load
        speed = _share(from_memory, rate, memory.every, memory.every + memory.stall, memory.write, recovery)
    return _share(from_disk, rate, interval, interval / speed + costs.stall, costs.write, costs.recovery)


def _share(failures: float, all_failures: float, work: float, length: float, write: float, recovery: float) -> float:
    """Of one level: `work` is kept every `length` seconds, `failures` of all failures fall back to this level."""
    exponent = failures * length
    kept = exponent / math.expm1(exponent) if exponent > 1e-12 else 1.0
    down = failures * math.expm1(all_failures * recovery) / all_failures
    return work / length * kept * math.exp(-failures * write) / (1 + down)


@dataclass(frozen=True)
class Recommendation:
    """What to set, and what share of the time is training then."""

    interval: float
    """Seconds of training between checkpoints on disk."""
    costs: Costs
    """As asked, with the best interval of the copies in memory."""
    share: float


def recommend(mtbf: float, costs: Costs) -> Recommendation:
    """The intervals with the largest share."""
    memory = costs.memory
    if memory is None:
        interval = best_interval(mtbf, costs)
        return Recommendation(interval, costs, effective_share(mtbf, interval, costs))

    def with_copies(every: float) -> Costs:
        return replace(costs, memory=replace(memory, every=every))

    def share(every: float) -> float:
        copied = with_copies(every)
        return effective_share(mtbf, best_interval(mtbf, copied), copied)

    every = _maximum(share, max(memory.write - memory.stall, 1.0), 20 * mtbf)
    copied = with_copies(every)
    return Recommendation(best_interval(mtbf, copied), copied, share(every))


def best_interval(mtbf: float, costs: Costs) -> float:
    """Of checkpoints on disk, with copies in memory as they are."""
    return _maximum(lambda interval: effective_share(mtbf, interval, costs), costs.shortest_interval, 20 * mtbf)


def _maximum(share: Callable[[float], float], low: float, high: float) -> float:
    """Where a share is largest, by golden section: over the logarithm of an interval it has one maximum."""
    start, end = math.log(low), math.log(max(high, 2 * low))
    golden = (math.sqrt(5) - 1) / 2
    while end - start > 1e-4:
        left, right = end - golden * (end - start), start + golden * (end - start)
        if share(math.exp(left)) < share(math.exp(right)):
            start = left
        else:
            end = right
    return max(low, math.exp((start + end) / 2), key=share)


def young_daly(mtbf: float, stall: float) -> float:
    """What the textbook says for rare failures."""
    return math.sqrt(2 * stall * mtbf)


def curve(mtbf: float, costs: Costs, intervals: Sequence[float]) -> list[float]:
    """The share at each interval; nothing is drawn where saves would overtake each other."""
    return [
        effective_share(mtbf, interval, costs) if interval >= costs.shortest_interval else math.nan
        for interval in intervals
    ]
