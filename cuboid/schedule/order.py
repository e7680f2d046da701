"""One order of everything the ranks of a pipeline do: compute, send, receive. It is why pipelines cannot deadlock.

What NCCL really does with a message: the first one between two ranks may block both hosts until the other side comes; a
send is a kernel that may wait for its receive; a receive is a kernel that waits for data; kernels of one communicator
run one after another; and whatever synchronises the device (an autotuner, an allocator that is short of memory, a
module that is loaded late) waits for all of them. So a receive that is issued too early can wait for data that depends
on work its own rank has still to issue, and a send that is issued too early for a receive nobody can reach.

The cure is one total order of all actions and all messages in which each comes after what it depends on. Every rank
issues its own part of that order, in that order. Then nothing deadlocks even if every call blocks its host until it has
ended, in whatever stream, communicator or thread it runs: of all calls that have not ended the first in the order has
only ended calls before it on every rank that takes part, so it is issued everywhere and ends. Collectives inside an
action (tensor, data, context and expert parallelism) are covered too: the pipelines of all replicas have one order.

Of all such orders this takes the one by time. A message comes right after the action that makes it, and actions come
by the moment they end when a forward takes one unit and a whole backward two. So a receive is issued just before the
action during which its data arrives: the transfer overlaps with that action, and no receive occupies the device for
longer. Real times differ from those units; that costs a little overlap and never the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from cuboid.errors import UserError
from cuboid.schedule.table import Action, Kind, Message, Schedule, needed, produced, program_of

UNITS: dict[Kind, int] = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}
"""How long actions take for the order: whole numbers, so that every rank finds the same order."""


@dataclass(frozen=True, slots=True)
class Compute:
    """One action, or a forward and a backward that run together and overlap."""

    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive; the action that needs the message waits for it."""

    message: Message


Instruction = Compute | Send | Receive


@lru_cache(maxsize=32)
def instructions(schedule: Schedule, paired: bool = False) -> tuple[tuple[Instruction, ...], ...]:
    """For each rank what it issues, in order. `paired`: run the pairs of DualPipeV together."""
    rows: list[list[Instruction]] = [[] for _ in range(schedule.ranks)]
    for rank, block in _in_order(schedule, paired):
        rows[rank].append(Compute(block))
        for action in block:
            message = produced(action, schedule)
            if message is not None:
                rows[rank].append(Send(message))
                rows[schedule.stage_rank[message.target_stage]].append(Receive(message))
    return tuple(map(tuple, rows))


def _in_order(schedule: Schedule, paired: bool) -> list[tuple[int, tuple[Action, ...]]]:
    """(rank, what it computes at once), by the moment that ends. An error says who waits where none can."""
    rows = [
        blocks(schedule, rank) if paired else [(action,) for action in row] for rank, row in enumerate(schedule.actions)
    ]
    position, clock = [0] * schedule.ranks, [0] * schedule.ranks
    sent: dict[Message, int] = {}  # message -> when it was there
    ended: list[tuple[int, int, tuple[Action, ...]]] = []
    waiting: dict[Message, int] = {}  # message -> the rank that waits for it
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(rows[rank]):
            block = rows[rank][position[rank]]
            inputs = [message for action in block if (message := needed(action, schedule)) is not None]
            missing = next((message for message in inputs if message not in sent), None)
            if missing is not None:
                waiting[missing] = rank
                break
            position[rank] += 1
            start = max([clock[rank], *(sent[message] for message in inputs)])
            clock[rank] = start + sum(UNITS[action.kind] for action in block)
            ended.append((clock[rank], rank, block))
            for message in (produced(action, schedule) for action in block):
                if message is not None:
                    sent[message] = clock[rank]
                    if message in waiting:
                        runnable.append(waiting.pop(message))
    stuck = [
        f"rank {rank} waits at {rows[rank][place][0]}" for rank, place in enumerate(position) if place < len(rows[rank])
    ]
    if stuck:
        raise UserError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)}")
    # What depends on another ends later than it, so the moment alone orders them; ranks only break ties.
    return [(rank, block) for _, rank, block in sorted(ended, key=lambda entry: entry[:2])]


def blocks(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """DualPipeV's pairs: a forward followed by a whole backward of another stage is one block. The first pair of the
    last rank stays apart, as published: it would only lengthen the bubble."""
    row: list[tuple[Action, ...]] = []
    apart = rank == schedule.ranks - 1
    for action in schedule.actions[rank]:
        before = row[-1][-1] if row else action
        pair = before.kind is Kind.FORWARD and action.kind is Kind.BACKWARD and before.stage != action.stage
        if pair and not apart and len(row[-1]) == 1:
            row[-1] = (before, action)
        else:
            row.append((action,))
        apart = apart and not pair
    return row


def pairs_overlap(schedule: Schedule) -> bool:
    """Whether pairs of this schedule can run together: DualPipeV with the micro-batches its pattern is made for."""
    return schedule.name == "dualpipev" and schedule.ranks > 1 and schedule.micro_batches >= 2 * schedule.ranks


def validate(schedule: Schedule) -> None:
    """Raise one sentence that names the first thing wrong, or return.

    Holds afterwards: each (stage, micro-batch) has one F, on the stage's rank, then either one B or one I and later one
    W; on a rank that holds neighbouring stages their order respects the model's; and the ranks cannot deadlock when
    each issues its instructions (`order`) one after another and every one of them blocks until it has ended, a send
    until the other rank has come to its receive. NCCL never waits for more than that.
    """
    _check_shape(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_rank(schedule, rank, actions)
    program_of(schedule)
    run_blocking(schedule, instructions(schedule))
    if pairs_overlap(schedule):
        run_blocking(schedule, instructions(schedule, paired=True))


def run_blocking(schedule: Schedule, rows: Sequence[Sequence[Instruction]]) -> None:
    """Run instructions of all ranks when each blocks its rank until it has ended; a message ends when both sides have
    come to it. An action whose input was never received, or ranks that wait for one another, are refused."""
    position = [0] * len(rows)
    received: list[set[Message]] = [set() for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                instruction = row[position[rank]]
                if isinstance(instruction, Compute):
                    _check_inputs(schedule, rank, instruction, received[rank])
                    position[rank] += 1
                    moved = True
                    continue
                message = instruction.message
                ends = (schedule.stage_rank[message.source_stage], schedule.stage_rank[message.target_stage])
                other = ends[1] if rank == ends[0] else ends[0]
                partner = Receive(message) if isinstance(instruction, Send) else Send(message)
                if position[other] == len(rows[other]) or rows[other][position[other]] != partner:
                    break
                position[rank] += 1
                position[other] += 1
                received[ends[1]].add(message)
                moved = True
    stuck = [
        f"rank {rank} at {row[place]}"
        for rank, (row, place) in enumerate(zip(rows, position, strict=True))
        if place < len(row)
    ]
    if stuck:
        _refuse(schedule, f"deadlocks where every call waits: {', '.join(stuck)}")


def _check_inputs(schedule: Schedule, rank: int, compute: Compute, received: set[Message]) -> None:
    for action in compute.actions:
        message = needed(action, schedule)
        if message is not None and message not in received:
            _refuse(schedule, f"has {action} on rank {rank} before the receive of {message}")


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.ranks:
        _refuse(schedule, f"has lists for {len(schedule.actions)} ranks, not {schedule.ranks}")
    if set(schedule.stage_rank) != set(range(schedule.ranks)):
        _refuse(
            schedule, f"places its stages on ranks {sorted(set(schedule.stage_rank))}, not on 0 to {schedule.ranks - 1}"
        )


def _check_rank(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    done: set[Action] = set()
    for action in actions:
        if not (0 <= action.stage < schedule.stages and schedule.stage_rank[action.stage] == rank):
            _refuse(schedule, f"has {action} on rank {rank}, which does not hold stage {action.stage}")
        if not 0 <= action.micro_batch < schedule.micro_batches:
            _refuse(schedule, f"has {action} on rank {rank}, but only {schedule.micro_batches} micro-batches")
        if action in done:
            _refuse(schedule, f"has {action} twice on rank {rank}")
        for choices in _needed_before(schedule, action):
            if not any(choice in done for choice in choices):
                _refuse(schedule, f"has {action} on rank {rank} before {' or '.join(map(str, choices))}")
        if action.kind in (Kind.BACKWARD, Kind.INPUT) and _other_backward(action) in done:
            _refuse(schedule, f"has both {action} and {_other_backward(action)} on rank {rank}")
        done.add(action)
    for stage in schedule.stages_of(rank):
        for batch in range(schedule.micro_batches):
            ends = (Action(Kind.BACKWARD, stage, batch), Action(Kind.WEIGHT, stage, batch))
            if not any(end in done for end in ends):
                _refuse(schedule, f"has neither {ends[0]} nor {ends[1]} on rank {rank}")


def _needed_before(schedule: Schedule, action: Action) -> list[tuple[Action, ...]]:
    """What must come earlier in the same rank's list: for each entry one of the given actions."""
    kind, stage, batch = action.kind, action.stage, action.micro_batch
    if kind is Kind.WEIGHT:
        return [(Action(Kind.INPUT, stage, batch),)]
    if kind is Kind.FORWARD:
        return [(Action(Kind.FORWARD, stage - 1, batch),)] if _same_rank(schedule, stage, stage - 1) else []
    needed: list[tuple[Action, ...]] = [(Action(Kind.FORWARD, stage, batch),)]
    if _same_rank(schedule, stage, stage + 1):
        needed.append((Action(Kind.BACKWARD, stage + 1, batch), Action(Kind.INPUT, stage + 1, batch)))
    return needed


def _same_rank(schedule: Schedule, stage: int, neighbour: int) -> bool:
    return 0 <= neighbour < schedule.stages and schedule.stage_rank[stage] == schedule.stage_rank[neighbour]


def _other_backward(action: Action) -> Action:
    other = Kind.INPUT if action.kind is Kind.BACKWARD else Kind.BACKWARD
    return Action(other, action.stage, action.micro_batch)


def _refuse(schedule: Schedule, what: str) -> NoReturn:
    raise UserError(f"schedule {schedule.name} {what}")
