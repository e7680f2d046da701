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

from dataclasses import dataclass
from functools import lru_cache

from cuboid.errors import UserError
from cuboid.schedule.table import Action, Kind, Message, Schedule, needed, produced

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
