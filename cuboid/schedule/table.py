"""A pipeline schedule as data: for every rank the list of actions it runs, in order, and who waits for whom.

The executor, the simulator, the validator and the drawings all read this one table. For a simulation a rank runs its
list strictly in order, and an action whose input comes from another rank waits for that message; sends are buffered
and never wait. Such a network ends in the same state whatever the timing (Kahn 1974). Real messages do wait: `order`
says how ranks issue them all the same, and proves it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuboid.errors import UserError


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looking for cycles: a table of a hundred thousand actions has none, and looking takes as long as making
    it does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Kind(Enum):
    """What an action computes for one micro-batch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of inputs and of weights."""
    INPUT = "I"
    """Only the gradient of the stage's inputs, which the previous stage waits for."""
    WEIGHT = "W"
    """Only the gradients of the stage's weights, which nobody waits for."""

    # Members are singletons, so identity is a valid hash and much faster than Enum's own.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One unit of work of a schedule, written `F3.0`: forward of stage 3 for micro-batch 0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Everything the ranks of one pipeline do in one step."""

    name: str
    ranks: int
    """Pipeline ranks; each holds one or more stages."""
    micro_batches: int
    stage_rank: tuple[int, ...]
    """For each stage the rank that holds it."""
    actions: tuple[tuple[Action, ...], ...] = field(hash=False, repr=False)
    """For each rank its actions in order. Not in the hash, to keep schedules cheap cache keys."""

    @property
    def stages(self) -> int:
        return len(self.stage_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.stage_rank) if holder == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into its input and weight halves."""
        return any(action.kind is Kind.INPUT for rank_actions in self.actions for action in rank_actions)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {join(actions)}" for rank, actions in enumerate(self.actions))


Row = NDArray[np.int64]
"""A rank's actions in order, as numbers: (micro-batch × stages + stage) × 4 + position of the kind in `Kind`."""
NO_ACTION = -1
"""What fills up the shorter rows of a table."""


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule as arrays."""

    name: str
    micro_batches: int
    stage_rank: tuple[int, ...]
    rows: NDArray[np.int64]
    """For each rank its row."""

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.stage_rank)

    @property
    def ports(self) -> NDArray[np.int64]:
        """4 × stage + position of the kind, for each action."""
        return self.rows % (len(Kind) * self.stages)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What a rank does, in order."""
        row = self.rows[rank][self.rows[rank] != NO_ACTION]
        kinds = map(list(Kind).__getitem__, (row % len(Kind)).tolist())
        stages, batches = (row // len(Kind) % self.stages).tolist(), (row // (len(Kind) * self.stages)).tolist()
        # Made as plain tuples are, in a third of the time.
        return tuple(map(_new_action, zip(kinds, stages, batches, strict=True)))

    @property
    def schedule(self) -> Schedule:
        """The same as lists of actions."""
        rows = tuple(self.actions(rank) for rank in range(self.ranks))
        return Schedule(self.name, self.ranks, self.micro_batches, self.stage_rank, rows)


_new_action: Callable[[tuple[Kind, int, int]], Action] = partial(tuple.__new__, Action)


def rows_as_table(name: str, micro_batches: int, stage_rank: tuple[int, ...], rows: Sequence[Row]) -> Table:
    """A row for each rank, of any length."""
    every = np.full((len(rows), max(map(len, rows))), NO_ACTION, dtype=np.int64)
    for place, row in zip(every, rows, strict=True):
        place[: len(row)] = row
    return Table(name, micro_batches, stage_rank, every)


def table_of(schedule: Schedule) -> Table:
    """A schedule's lists as arrays."""
    place = {kind: position for position, kind in enumerate(Kind)}
    rows = [
        np.array([(batch * schedule.stages + stage) * len(Kind) + place[kind] for kind, stage, batch in row], np.int64)
        for row in schedule.actions
    ]
    return rows_as_table(schedule.name, schedule.micro_batches, schedule.stage_rank, rows)


def join(actions: Iterable[Action]) -> str:
    """Actions in one line, `F0.0 F0.1 B0.0`."""
    return " ".join(map(str, actions))


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage sends its neighbour for a micro-batch: an activation upwards or a gradient downwards."""

    source_stage: int
    target_stage: int
    micro_batch: int


def produced(action: Action, schedule: Schedule) -> Message | None:
    """The message an action sends to another rank, if any."""
    if action.kind is Kind.WEIGHT:
        return None
    target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    return _between_ranks(action.stage, target, action.micro_batch, schedule)


def needed(action: Action, schedule: Schedule) -> Message | None:
    """The message from another rank that an action waits for, if any."""
    if action.kind is Kind.WEIGHT:
        return None
    source = action.stage - (1 if action.kind is Kind.FORWARD else -1)
    return _between_ranks(source, action.stage, action.micro_batch, schedule)


def _between_ranks(source: int, target: int, micro_batch: int, schedule: Schedule) -> Message | None:
    if min(source, target) < 0 or max(source, target) >= schedule.stages:
        return None
    if schedule.stage_rank[source] == schedule.stage_rank[target]:
        return None
    return Message(source, target, micro_batch)


@dataclass(frozen=True)
class Program:
    """A schedule's actions in one order that respects all waiting, ready for one pass that adds up time."""

    actions: tuple[Action, ...]
    steps: tuple[tuple[int, int, int, int], ...]
    """Per action: its rank; 4 × stage + position of its kind in `Kind`; the 1-based step whose message it waits for
    (0: none); the boundary that message crosses, i between stages i and i + 1 (stages - 1: none)."""


@lru_cache(maxsize=256)
@uncollected()
def program_of(schedule: Schedule) -> Program:
    """Run the schedule once without a clock; an error says who waits for whom when it cannot finish."""
    ports = _ports(schedule)
    sent_by = [0] * (2 * schedule.stages * schedule.micro_batches)  # message -> the step that sent it
    waiting: dict[int, int] = {}  # message -> the rank that waits for it
    position = [0] * schedule.ranks
    actions: list[Action] = []
    steps: list[tuple[int, int, int, int]] = []
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        row, index = schedule.actions[rank], position[rank]
        while index < len(row):
            action = row[index]
            kind, stage, micro_batch = action
            cost, boundary, receives, sends = ports[kind][stage]
            after = 0
            if receives is not None:
                message = receives + micro_batch
                after = sent_by[message]
                if after == 0:
                    waiting[message] = rank
                    break
            index += 1
            actions.append(action)
            steps.append((rank, cost, after, boundary))
            if sends is not None:
                message = sends + micro_batch
                sent_by[message] = len(steps)
                if message in waiting:
                    runnable.append(waiting.pop(message))
        position[rank] = index
    rows = enumerate(zip(schedule.actions, position, strict=True))
    stuck = [f"rank {rank} waits at {row[index]}" for rank, (row, index) in rows if index < len(row)]
    if stuck:
        raise UserError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)}")
    return Program(tuple(actions), tuple(steps))


class _Port(NamedTuple):
    """What all actions of one kind on one stage share. A message's number is that of its port plus its micro-batch."""

    cost: int
    boundary: int
    receives: int | None
    sends: int | None


def _ports(schedule: Schedule) -> dict[Kind, list[_Port]]:
    last = schedule.stages - 1
    crosses = [before != after for before, after in pairwise(schedule.stage_rank)]

    def number(boundary: int, gradient: bool) -> int | None:
        if not (0 <= boundary < last and crosses[boundary]):
            return None
        return (2 * boundary + gradient) * schedule.micro_batches

    ports: dict[Kind, list[_Port]] = {kind: [] for kind in Kind}
    for stage in range(schedule.stages):
        for position, kind in enumerate(Kind):
            gradient = kind is not Kind.FORWARD
            before, after = (stage, stage - 1) if gradient else (stage - 1, stage)
            receives, sends = number(before, gradient), number(after, gradient)
            if kind is Kind.WEIGHT:
                receives = sends = None
            crossed = last if receives is None else before
            ports[kind].append(_Port(4 * stage + position, crossed, receives, sends))
    return ports
