"""Which steps are checked, by which checks, on which blocks.

In a round of steps each check runs once and the replay four times, spread over the round, so that no step is much
longer than the others. A round covers a few blocks of each stage, the next round the next ones.

The steps after a start are checked by all checks, because a checkpoint or another layout may have changed something. So
is the step after one that seems wrong, to find where the error begins."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import Unit
from cuboid.spec.checks import ChecksSpec

ROUND = (
    ("data", "passes", "updates", "matrices", "copies"),
    ("replay", "sums"),
    ("replay",),
    ("replay",),
    ("replay",),
)
"""The checks of each sampled step of a round. Few steps are sampled, because in each the host waits for the device
once, and the device for the host."""
BLOCKS = 2
"""Blocks of each stage that a round covers."""
REMEMBERED = 8
"""Rounds whose time decides how long the next one is."""


@dataclass(frozen=True)
class SampledStep:
    """A step that is checked, and what is checked in it."""

    step: int
    """Counted from 1."""
    names: frozenset[str]
    """Of the checks that run."""
    blocks: tuple[str, ...] | None = None
    """The blocks that are checked, beside everything that is no block; None: all."""
    repeats: bool = False
    """Whether it checks once more what the last sampled step seemed to have wrong."""

    @property
    def covers_all(self) -> bool:
        return self.blocks is None

    def includes(self, unit: Unit) -> bool:
        if self.blocks is None or not unit.name.startswith("layers."):
            return True
        return any(f"{unit.name}.".startswith(f"{block}.") for block in self.blocks)


class Sampling:
    def __init__(self, engine: Engine, spec: ChecksSpec, done: int) -> None:
        """`done`: steps that the run had when it started."""
        self._spec = spec
        segments = [segment.name for stage in engine.pipeline.stages.values() for segment in stage.segments]
        self._blocks = [name for name in segments if name.startswith("layers.")]
        made = [frozenset(names) & frozenset(spec.names) for names in ROUND]
        self._places = [names for names in made if names]
        self._rounds = done // spec.every
        self.length = spec.every
        """Of this round, in steps."""
        self.next_length = self.length
        self.start_again(done)

    def start_again(self, done: int) -> None:
        self._begin, self._whole_until, self._repeat = done, done + self._spec.first, 0

    def repeat_at(self, step: int) -> None:
        """Run all checks on everything in that step."""
        self._repeat = step

    def _place(self, index: int) -> int:
        """Of a sampled step in the round, from 0: the middle of its part of the round."""
        return (2 * index + 1) * self.length // (2 * len(self._places))

    def is_first_of_round(self, step: int) -> bool:
        """Whether it is the first sampled step of its round."""
        return step == self._begin + 1 + self._place(0)

    def at(self, step: int) -> SampledStep | None:
        """What is checked in a step; None: nothing. Called for every step, in order."""
        if step > self._begin + self.length:
            self._begin, self._rounds, self.length = step - 1, self._rounds + 1, self.next_length
        if step == self._repeat or step <= self._whole_until:
            return SampledStep(step, frozenset(self._spec.names), repeats=step == self._repeat)
        place = step - self._begin - 1
        due = [names for index, names in enumerate(self._places) if self._place(index) == place]
        first = BLOCKS * self._rounds
        blocks = tuple(self._blocks[(first + each) % len(self._blocks)] for each in range(BLOCKS) if self._blocks)
        return SampledStep(step, frozenset().union(*due), blocks) if due else None


class CheckTimer:
    """How much longer a round takes than as many unchecked steps: its checks, what they make the device wait, and what
    follows from that in the next step."""

    def __init__(self, spec: ChecksSpec) -> None:
        self._spec = spec
        self._plain: deque[float] = deque(maxlen=100)
        """Seconds of unchecked steps."""
        self._sampled: list[float] = []
        """Seconds of the sampled steps of this round, and of the step after each."""
        self._between = 0.0
        """Seconds of checks between steps."""
        self._rounds: deque[float] = deque(maxlen=REMEMBERED)
        self._calls = 0
        self._last = 0
        """The last step that was sampled."""

    def note(self, step: int, seconds: float, sampled: SampledStep | None) -> None:
        if sampled is not None:
            self._last = step
        if step not in (self._last, self._last + 1):
            self._plain.append(seconds)
        elif sampled is None or not sampled.covers_all:  # the checks after a start run once, and do not count
            self._sampled.append(seconds)

    def add(self, seconds: float) -> None:
        """Seconds of checks that no step's time includes."""
        self._between += seconds

    def next_length(self) -> int:
        """Steps of the next round: as many as keep the checks below `checks.share` of the time. Called at the first
        sampled step of each round; the first call has not seen a whole round and does not count it."""
        self._calls += 1
        if self._calls > 1 and self._sampled and self._plain:
            step = median(self._plain)
            more = sum(self._sampled) - len(self._sampled) * step + self._between
            self._rounds.append(more / step)
        self._sampled, self._between = [], 0.0
        if not self._rounds:
            return self._spec.every
        return max(self._spec.every, math.ceil(median(self._rounds) / self._spec.share))
