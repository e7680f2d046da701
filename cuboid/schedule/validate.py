"""Check that a schedule computes every gradient exactly once and can run to its end on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from cuboid.errors import UserError
from cuboid.schedule.order import Compute, Instruction, Receive, Send, instructions, pairs_overlap
from cuboid.schedule.table import Action, Kind, Message, Schedule, needed, program_of


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
