"""Who waits for whom in a schedule: the messages of its actions, and one order of them that a simulation can follow.

Here a rank runs its list strictly in order, and an action whose input comes from another rank waits for that message;
sends are buffered and never wait. Such a network ends in the same state whatever the timing (Kahn 1974), which is what
a simulation needs. Real messages do wait: `order` says how ranks issue them all the same, and `validate` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from cuboid.errors import UserError
from cuboid.schedule.table import Action, Kind, Schedule


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
        row = schedule.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            port = ports[action.kind][action.stage]
            after = 0
            if port.receives is not None:
                message = port.receives + action.micro_batch
                after = sent_by[message]
                if after == 0:
                    waiting[message] = rank
                    break
            position[rank] += 1
            actions.append(action)
            steps.append((rank, port.cost, after, port.boundary))
            if port.sends is not None:
                message = port.sends + action.micro_batch
                sent_by[message] = len(steps)
                if message in waiting:
                    runnable.append(waiting.pop(message))
    _refuse_deadlock(schedule, position)
    return Program(tuple(actions), tuple(steps))


@dataclass(frozen=True, slots=True)
class _Port:
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


def _refuse_deadlock(schedule: Schedule, position: list[int]) -> None:
    stuck = [
        f"rank {rank} waits at {row[index]}"
        for rank, (row, index) in enumerate(zip(schedule.actions, position, strict=True))
        if index < len(row)
    ]
    if stuck:
        raise UserError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)}")
