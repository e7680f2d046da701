"""How much of the time is training when machines fail: a closed form, and the checkpoint interval that makes it most.

A failure ends the work since the newest checkpoint that was whole. With failures at random moments, λ = 1 / mean time
between them, an interval τ of training, a stall s for each checkpoint, a write of w seconds behind the training's back,
and R seconds until training continues,

    fraction = τ λ e^(-λ (R + w)) / (e^(λ (τ + s)) - 1)

is exact: between two failures, exponential time 1/λ passes and recovery takes (e^(λR) - 1)/λ, because it can fail too;
the j-th checkpoint counts if nothing fails for j (τ + s) + w seconds. For small λ the best τ is √(2 s / λ), as Young
and Daly found. Copies in memory are a second level of the same kind inside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

HOUR = 3600.0
MOST_SAVES = 20_000
"""Between two failures: more of them would gain less than a ten-thousandth of the time."""
LARGEST_EXPONENT = 700.0
"""Of e, in a float."""
EVENTS = 400_000
"""That a simulation goes through, about a second."""


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
    """Fraction of failures that leave one of the two copies."""


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


def effective_fraction(mtbf: float, interval: float, costs: Costs) -> float:
    """Fraction of the time in which training gets on; `mtbf` and `interval` in seconds."""
    rate, speed = 1 / mtbf, 1.0
    memory = costs.memory
    from_disk = rate
    if memory is not None:
        from_memory = rate * memory.survives
        from_disk = rate - from_memory
        recovery = costs.detect + costs.restart + memory.load
        speed = _fraction(from_memory, rate, memory.every, memory.every + memory.stall, memory.write, recovery)
        if not speed:
            return 0.0
    return _fraction(from_disk, rate, interval, interval / speed + costs.stall, costs.write, costs.recovery)


def _fraction(failures: float, all_failures: float, work: float, length: float, write: float, recovery: float) -> float:
    """Of one level: `work` is kept every `length` seconds, `failures` of all failures fall back to this level."""
    exponent = failures * length
    if max(exponent, all_failures * recovery) > LARGEST_EXPONENT:  # nothing ever gets done
        return 0.0
    kept = exponent / math.expm1(exponent) if exponent > 1e-12 else 1.0
    down = failures * math.expm1(all_failures * recovery) / all_failures
    return work / length * kept * math.exp(-failures * write) / (1 + down)


@dataclass(frozen=True)
class Recommendation:
    """What to set, and what fraction of the time is training then."""

    interval: float
    """Seconds of training between checkpoints on disk."""
    costs: Costs
    """As asked, with the best interval of the copies in memory."""
    fraction: float


def recommend(mtbf: float, costs: Costs) -> Recommendation:
    """The intervals with the largest fraction."""
    memory = costs.memory
    if memory is None:
        interval = best_interval(mtbf, costs)
        return Recommendation(interval, costs, effective_fraction(mtbf, interval, costs))

    def with_copies(every: float) -> Costs:
        return replace(costs, memory=replace(memory, every=every))

    def fraction(every: float) -> float:
        copied = with_copies(every)
        return effective_fraction(mtbf, best_interval(mtbf, copied), copied)

    every = _maximum(fraction, max(memory.write - memory.stall, 1.0, mtbf / MOST_SAVES), 20 * mtbf)
    copied = with_copies(every)
    return Recommendation(best_interval(mtbf, copied), copied, fraction(every))


def best_interval(mtbf: float, costs: Costs) -> float:
    """Of checkpoints on disk, with copies in memory as they are."""
    shortest = max(costs.shortest_interval, mtbf / MOST_SAVES)
    return _maximum(lambda interval: effective_fraction(mtbf, interval, costs), shortest, 20 * mtbf)


def _maximum(fraction: Callable[[float], float], low: float, high: float) -> float:
    """Where a fraction is largest, by golden section: over the logarithm of an interval it has one maximum."""
    start, end = math.log(low), math.log(max(high, 2 * low))
    golden = (math.sqrt(5) - 1) / 2
    while end - start > 1e-4:
        left, right = end - golden * (end - start), start + golden * (end - start)
        if fraction(math.exp(left)) < fraction(math.exp(right)):
            start = left
        else:
            end = right
    return max(low, math.exp((start + end) / 2), key=fraction)


def young_daly(mtbf: float, stall: float) -> float:
    """What the textbook says for rare failures."""
    return math.sqrt(2 * stall * mtbf)


def curve(mtbf: float, costs: Costs, intervals: Sequence[float]) -> list[float]:
    """The fraction at each interval; nothing is drawn where saves would overtake each other."""
    return [
        effective_fraction(mtbf, interval, costs) if interval >= costs.shortest_interval else math.nan
        for interval in intervals
    ]


# A training under failures, event by event: what the closed form of `effective_time` is held against.


@dataclass(frozen=True)
class TimeSpent:
    """Where the seconds of a simulated training went."""

    training: float
    """That was kept."""
    redone: float
    """Training that a failure undid."""
    saving: float
    down: float
    """From failures until training continued."""
    failures: int

    @property
    def total(self) -> float:
        return self.training + self.redone + self.saving + self.down

    @property
    def effective(self) -> float:
        return self.training / self.total


@dataclass
class _Copies:
    """Checkpoints of one level: the newest whole one, and one that is being written."""

    every: float
    stall: float
    write: float
    whole: float = 0.0
    """Seconds of training in it."""
    due: float = 0.0
    """Seconds of training at which the next is taken."""
    pending: list[tuple[float, float]] = field(default_factory=list)
    """When it will be whole, and what is in it."""

    def settle(self, now: float) -> None:
        while self.pending and self.pending[0][0] <= now:
            self.whole = self.pending.pop(0)[1]

    def restart(self, work: float) -> None:
        self.whole, self.due, self.pending = work, work + self.every, []


class _Failure(Exception):
    """Comes in the middle of anything."""


class _Simulation:
    def __init__(self, mtbf: float, interval: float, costs: Costs, seed: int) -> None:
        self._random = random.Random(seed)
        self._mtbf, self._costs = mtbf, costs
        self._disk = _Copies(interval, costs.stall, costs.write)
        memory = costs.memory
        self._memory = _Copies(memory.every, memory.stall, memory.write) if memory else None
        self._levels = [level for level in (self._memory, self._disk) if level]
        for level in self._levels:
            level.restart(0.0)
        self.now = self.work = self.trained = self.saving = self.down = 0.0
        self._next_failure = self._random.expovariate(1 / mtbf)

    def _pass(self, seconds: float) -> float:
        """So much of it as comes before the next failure."""
        spent = min(seconds, self._next_failure - self.now)
        self.now += spent
        return spent

    def _train(self) -> None:
        wanted = min(level.due for level in self._levels) - self.work
        spent = self._pass(wanted)
        self.work += spent
        self.trained += spent
        if spent < wanted:
            raise _Failure

    def _save(self, level: _Copies) -> None:
        level.settle(self.now)
        wanted = level.stall + max((ready - self.now for ready, _ in level.pending), default=0.0)
        spent = self._pass(wanted)
        self.saving += spent
        if spent < wanted:
            raise _Failure
        level.settle(self.now)
        level.pending.append((self.now + level.write, self.work))
        level.due = self.work + level.every

    def _recover(self) -> None:
        from_memory = self._memory is not None
        for level in self._levels:
            level.settle(self.now)
        while True:
            memory = self._costs.memory
            from_memory = from_memory and memory is not None and self._random.random() < memory.survives
            load = memory.load if from_memory and memory is not None else self._costs.load
            self._next_failure = self.now + self._random.expovariate(1 / self._mtbf)
            wanted = self._costs.detect + self._costs.restart + load
            spent = self._pass(wanted)
            self.down += spent
            if spent == wanted:
                break
        self.work = max(self._disk.whole, self._memory.whole) if from_memory and self._memory else self._disk.whole
        if self._memory:
            self._memory.restart(self.work)
        due = self._disk.due
        self._disk.restart(self._disk.whole)
        if from_memory:  # the disk's next turn stays where it was in the training
            self._disk.due = max(due, self.work)

    def run(self, failures: int) -> TimeSpent:
        for _ in range(failures):
            try:
                while True:
                    self._train()
                    for level in self._levels:
                        if level.due <= self.work:
                            self._save(level)
            except _Failure:
                self._recover()
        return TimeSpent(self.work, self.trained - self.work, self.saving, self.down, failures)


def simulate(mtbf: float, interval: float, costs: Costs, failures: int = 400, seed: int = 0) -> TimeSpent:
    """A training through so many failures, at random moments `mtbf` seconds apart on average; through fewer where
    there is much to do between two."""
    saves = mtbf / interval + (mtbf / costs.memory.every if costs.memory else 0.0)
    failures = max(4, min(failures, int(EVENTS / max(saves, 1.0))))
    return _Simulation(mtbf, interval, costs, seed).run(failures)
