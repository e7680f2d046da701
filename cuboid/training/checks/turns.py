"""Whose turn it is: in a round of steps each check comes once and a replay four times, spread over the round, so that
no step is much longer than the others; a few blocks of each stage take part, others in the next round.

What comes from a checkpoint, or with another layout, is new: the steps after a start are looked at by all checks. So is
the step after one that seems wrong, to say where it began to be."""

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
"""At few steps: at each the host waits for the device once, and the device for the host."""
BLOCKS = 2
"""Of each stage, that a round looks at."""
REMEMBERED = 8
"""Rounds whose time decides how long the next one is."""


@dataclass(frozen=True)
class Look:
    """At one step."""

    step: int
    """Counted from 1."""
    names: frozenset[str]
    """Of the checks that are made."""
    blocks: tuple[str, ...] | None = None
    """That take part, beside everything that is no block; None: all."""
    again: bool = False
    """Whether it looks at what was looked at last."""

    @property
    def is_whole(self) -> bool:
        return self.blocks is None

    def sees(self, unit: Unit) -> bool:
        if self.blocks is None or not unit.name.startswith("layers."):
            return True
        return any(f"{unit.name}.".startswith(f"{block}.") for block in self.blocks)


class Turns:
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
        self._begin, self._whole_until, self._again = done, done + self._spec.first, 0

    def look_again(self, step: int) -> None:
        """All checks, at everything."""
        self._again = step

    def _place(self, index: int) -> int:
        """In the round, from 0: in the middle of its part of it."""
        return (2 * index + 1) * self.length // (2 * len(self._places))

    def begins_with(self, step: int) -> bool:
        """Whether it has the first look of its round."""
        return step == self._begin + 1 + self._place(0)

    def look(self, step: int) -> Look | None:
        """Called for every step, in order."""
        if step > self._begin + self.length:
            self._begin, self._rounds, self.length = step - 1, self._rounds + 1, self.next_length
        if step == self._again or step <= self._whole_until:
            return Look(step, frozenset(self._spec.names), again=step == self._again)
        place = step - self._begin - 1
        due = [names for index, names in enumerate(self._places) if self._place(index) == place]
        first = BLOCKS * self._rounds
        blocks = tuple(self._blocks[(first + each) % len(self._blocks)] for each in range(BLOCKS) if self._blocks)
        return Look(step, frozenset().union(*due), blocks) if due else None


class Clock:
    """What a round takes, beside steps that nobody looks at: its checks, what they make the device wait, and what
    follows from that in the step behind."""

    def __init__(self, spec: ChecksSpec) -> None:
        self._spec = spec
        self._plain: deque[float] = deque(maxlen=100)
        self._looked: list[float] = []
        self._beside = 0.0
        """Of checks, between steps."""
        self._rounds: deque[float] = deque(maxlen=REMEMBERED)
        self._calls = 0
        self._last = 0
        """The step that was looked at last."""

    def note(self, step: int, seconds: float, look: Look | None) -> None:
        if look is not None:
            self._last = step
        if step not in (self._last, self._last + 1):
            self._plain.append(seconds)
        elif look is None or not look.is_whole:  # what a start takes comes once
            self._looked.append(seconds)

    def add(self, seconds: float) -> None:
        """What is no part of a step."""
        self._beside += seconds

    def next_length(self) -> int:
        """Of the next round, in steps: as many as keep checks below their share of the time. Called at the first look
        of each round; the first time not all of a round has been seen."""
        self._calls += 1
        if self._calls > 1 and self._looked and self._plain:
            step = median(self._plain)
            more = sum(self._looked) - len(self._looked) * step + self._beside
            self._rounds.append(more / step)
        self._looked, self._beside = [], 0.0
        if not self._rounds:
            return self._spec.every
        return max(self._spec.every, math.ceil(median(self._rounds) / self._spec.share))
