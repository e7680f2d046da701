"""The order in which a schedule's actions can run, and what each waits for: the base of validation and simulation.

The model of execution is the executor's. A rank runs its list strictly in order; an action whose input comes from another
rank waits for that message; sends are buffered and never wait. Messages from one rank to another share one first-in
first-out channel, and the receiver takes them in the order they were sent, keeping early ones until their action comes up.
Such a network of processes always ends in the same state whatever the timing (Kahn 1974), so one run that ends proves
that none can deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

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


def channels(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """For each (sending rank, receiving rank) its messages in the order they are sent, which is the order to receive them."""
    sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            message = produced(action, schedule)
            if message is not None:
                sent[rank, schedule.stage_rank[message.target_stage]].append(message)
    return {pair: tuple(messages) for pair, messages in sorted(sent.items())}


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
    count, no_boundary = schedule.micro_batches, schedule.stages - 1
    kinds = {kind: position for position, kind in enumerate(Kind)}
    sent = [0] * (2 * schedule.stages * count)  # slot of a message -> the step that sent it
    waiting: dict[int, int] = {}  # slot of a message -> the rank that waits for it
    position = [0] * schedule.ranks
    actions: list[Action] = []
    steps: list[tuple[int, int, int, int]] = []
    runnable = list(range(schedule.ranks))
    upward, downward = _crossings(schedule)
    while runnable:
        rank = runnable.pop()
        row = schedule.actions[rank]
        for index in range(position[rank], len(row)):
            action = row[index]
            kind, stage = action.kind, action.stage
            after, boundary, slot_out = 0, no_boundary, -1
            if kind is Kind.FORWARD:
                if upward[stage]:
                    slot = stage * count + action.micro_batch
                    after, boundary = sent[slot], stage - 1
                if downward[stage]:
                    slot_out = (stage + 1) * count + action.micro_batch
            elif kind is not Kind.WEIGHT:
                if downward[stage]:
                    slot = (schedule.stages + stage) * count + action.micro_batch
                    after, boundary = sent[slot], stage
                if upward[stage]:
                    slot_out = (schedule.stages + stage - 1) * count + action.micro_batch
            if boundary != no_boundary and after == 0:
                waiting[slot] = rank
                position[rank] = index
                break
            actions.append(action)
            steps.append((rank, 4 * stage + kinds[kind], after, boundary))
            if slot_out >= 0:
                sent[slot_out] = len(steps)
                if slot_out in waiting:
                    runnable.append(waiting.pop(slot_out))
        else:
            position[rank] = len(row)
    _refuse_deadlock(schedule, position)
    return Program(tuple(actions), tuple(steps))


def _crossings(schedule: Schedule) -> tuple[list[bool], list[bool]]:
    """For each stage, whether its predecessor and whether its successor live on another rank."""
    crosses = [before != after for before, after in zip(schedule.stage_rank, schedule.stage_rank[1:], strict=False)]
    return [False, *crosses], [*crosses, False]


def _refuse_deadlock(schedule: Schedule, position: list[int]) -> None:
    stuck = [
        f"rank {rank} waits at {row[index]}"
        for rank, (row, index) in enumerate(zip(schedule.actions, position, strict=True))
        if index < len(row)
    ]
    if stuck:
        raise UserError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)}")
