"""A training under failures, event by event: what the closed form of `effective_time` is held against."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cuboid.cost.effective_time import Costs


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
    """A training through so many failures, at random moments `mtbf` seconds apart on average."""
    return _Simulation(mtbf, interval, costs, seed).run(failures)
