"""A pipeline schedule as data: for every rank the list of actions it runs, in order, and who waits for whom.

The executor, the simulator, the validator and the drawings all read this one table. For a simulation a rank runs its
list strictly in order, and an action whose input comes from another rank waits for that message; sends are buffered
and never wait. Such a network ends in the same state whatever the timing (Kahn 1974). Real messages do wait: `order`
says how ranks issue them all the same, and proves it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

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
    rows = zip(schedule.actions, position, strict=True)
    refuse_deadlock(schedule, [row[index] if index < len(row) else None for row, index in rows])
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


def timed_ports(schedule: Schedule, cost: list[float]) -> dict[Kind, list[tuple[float, int | None, int | None]]]:
    """For every kind and stage its seconds (of `cost`, at the place of its port), and the first message that it
    receives and sends."""
    ports = _ports(schedule)
    return {kind: [(cost[port.cost], port.receives, port.sends) for port in row] for kind, row in ports.items()}


def refuse_deadlock(schedule: Schedule, stopped: Sequence[Action | None]) -> None:
    """An error where a rank never came past an action."""
    stuck = [f"rank {rank} waits at {action}" for rank, action in enumerate(stopped) if action is not None]
    if stuck:
        raise UserError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)}")
