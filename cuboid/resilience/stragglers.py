"""Which rank the others wait for when none hangs: what each rank's steps are made of, read from their heartbeats.

In a step everybody takes as long as the slowest; what differs is how much of it a rank needs for itself. Ranks of the
same stage do the same work, so one that needs much more than they do is slow, and it shows in what. On a GPU the host
does not see what its device waits for: there only data and the host's own time tell ranks apart."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from cuboid.console import say
from cuboid.readers import Unreadable, read_json
from cuboid.resilience.rebalance import Pace
from cuboid.spec.layout import Layout
from cuboid.spec.ranks import coordinates
from cuboid.telemetry.heartbeat import Reading

FILES = "ranks-*.jsonl"
SLOWEST = "slowest.json"
STEPS, SECONDS = 10, 5.0
"""A window is at least so many steps and so long."""
SLOW = 1.5
"""Times its peers' time from which a rank is slow."""
WINDOWS = 3
"""In a row, until it is said."""


@dataclass(frozen=True)
class StepTimes:
    """What a step of one rank is made of, in seconds."""

    rank: int
    compute: float
    wait: float
    """For other ranks."""
    data: float
    save: float

    @property
    def own(self) -> float:
        """What the others may wait for."""
        return self.compute + self.data


@dataclass(frozen=True)
class Slowest:
    rank: int
    because: Literal["compute", "data"]
    seconds: float
    """Of its own in a step."""
    peers: float
    """The median of the ranks that do the same."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.peers if self.peers else 1.0


def step_times(before: Sequence[Reading], after: Sequence[Reading]) -> list[StepTimes]:
    """Of the steps between two looks at the same ranks."""
    earlier = {reading.rank: reading for reading in before}
    result = []
    for reading in after:
        past = earlier.get(reading.rank)
        if past is None or reading.step <= past.step or reading.pid != past.pid:
            continue
        steps = reading.step - past.step
        wait, data = (reading.waited - past.waited) / steps, (reading.read - past.read) / steps
        step = (reading.spent.get("step", 0.0) - past.spent.get("step", 0.0)) / steps
        save = (reading.spent.get("save", 0.0) - past.spent.get("save", 0.0)) / steps
        result.append(StepTimes(reading.rank, max(0.0, step - wait - data), wait, data, save))
    return result


def slowest(found: Sequence[StepTimes], layout: Layout) -> Slowest | None:
    """The rank that is furthest behind those of its stage; None where no stage has two."""
    candidates = []
    for times in found:
        stage = coordinates(times.rank, layout).pp
        peers = [one for one in found if one.rank != times.rank and coordinates(one.rank, layout).pp == stage]
        if peers:
            compute, data = median(one.compute for one in peers), median(one.data for one in peers)
            because: Literal["compute", "data"] = "data" if times.data - data > times.compute - compute else "compute"
            candidates.append(Slowest(times.rank, because, times.own, median(one.own for one in peers)))
    return max(candidates, key=lambda one: one.ratio, default=None)


class Stragglers:
    """Looks at all heartbeats every few seconds; one line a window in the run's folder, and the slowest rank for
    the metrics."""

    def __init__(self, layout: Layout, run_folder: Path, heartbeats: Path) -> None:
        self._layout, self._run_folder, self._heartbeats = layout, run_folder, heartbeats
        self._before: list[Reading] = []
        self._moment = 0.0
        self._slow: list[int] = []
        """The slow rank of each of the last windows, or −1."""
        self._said: set[int] = set()

    def is_due(self, step: int) -> bool:
        """Whether a window may be over; `step`: that of any rank."""
        if not self._before:
            return step > 1  # the first also warms up
        return step >= self._before[0].step + STEPS and time.monotonic() >= self._moment + SECONDS

    def look(self, readings: list[Reading]) -> Pace | None:
        """Of the window that is over now; None of the first."""
        before, self._before, self._moment = self._before, readings, time.monotonic()
        found = step_times(before, readings)
        if not found:
            return None
        worst = slowest(found, self._layout)
        self._keep(found, worst, readings[0].step)
        is_slow = worst is not None and worst.ratio >= SLOW
        self._slow = [*self._slow, worst.rank if worst is not None and is_slow else -1][-WINDOWS:]
        if worst is not None and self._slow == WINDOWS * [worst.rank] and worst.rank not in self._said:
            self._said.add(worst.rank)
            say(
                f"rank {worst.rank} is slow: {worst.seconds:.2f} s of its own in each step, the others of its stage "
                f"{worst.peers:.2f} s; the difference is in {worst.because}",
                as_warning=True,
            )
        setup = max(reading.spent.get("set-up", 0.0) for reading in readings)
        whole = max(one.own + one.wait for one in found)
        return Pace(readings[0].step, max(one.own for one in found), whole, setup)

    def _keep(self, found: list[StepTimes], worst: Slowest | None, step: int) -> None:
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "ranks": [_rounded(one) for one in found]}
        with suppress(OSError):
            with (self._run_folder / FILES.replace("*", f"{found[0].rank:05d}")).open("a") as file:
                file.write(json.dumps(row) + "\n")
            if worst is not None:
                aside = self._heartbeats / f".{SLOWEST}"
                aside.write_text(json.dumps(_rounded(worst)))
                os.replace(aside, self._heartbeats / SLOWEST)


def read_slowest(heartbeats: Path | None) -> dict[str, Any] | None:
    """As last written, for the rows of metrics.jsonl."""
    if heartbeats is not None:
        with suppress(Unreadable):
            return read_json(heartbeats / SLOWEST)
    return None


def _rounded(record: StepTimes | Slowest) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(record).items()}
