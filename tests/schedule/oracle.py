"""A slow second simulator, written another way, to check the fast one: relax all start times until nothing changes."""

from collections.abc import Sequence

from cuboid.schedule.simulate import StageCosts
from cuboid.schedule.table import Action, Kind, Schedule

Block = tuple[Action, ...]


def singles(schedule: Schedule) -> list[list[Block]]:
    """Every action by itself."""
    return [[(action,) for action in actions] for actions in schedule.actions]


def overlapped_pairs(schedule: Schedule) -> list[list[Block]]:
    """DualPipe's picture: a forward followed by a whole backward of another stage runs as one, giving both results at
    its end. The last rank's first pair is left apart, as published."""
    rows: list[list[Block]] = []
    for rank, actions in enumerate(schedule.actions):
        row: list[Block] = []
        apart = rank == schedule.ranks - 1
        for action in actions:
            before = row[-1][-1] if row else action
            pair = before.kind is Kind.FORWARD and action.kind is Kind.BACKWARD and before.stage != action.stage
            if pair and not apart:
                row[-1] = (before, action)
            else:
                row.append((action,))
            apart = apart and not pair
        rows.append(row)
    return rows


def slow_makespan(schedule: Schedule, rows: Sequence[Sequence[Block]], costs: StageCosts, transfer: float) -> float:
    ends: dict[Action, float] = {action: 0.0 for row in rows for block in row for action in block}
    changed = True
    while changed:
        changed = False
        for row in rows:
            clock = 0.0
            for block in row:
                ready = [_ready(schedule, action, ends, transfer) for action in block]
                clock = max(clock, *ready) + sum(duration(action, costs) for action in block)
                for action in block:
                    changed |= ends[action] != clock
                    ends[action] = clock
    return max(ends.values())


def duration(action: Action, costs: StageCosts) -> float:
    forward, first, second = (
        seconds[action.stage] for seconds in (costs.forward, costs.input_backward, costs.weight_backward)
    )
    return {Kind.FORWARD: forward, Kind.BACKWARD: first + second, Kind.INPUT: first, Kind.WEIGHT: second}[action.kind]


def _ready(schedule: Schedule, action: Action, ends: dict[Action, float], transfer: float) -> float:
    if action.kind is Kind.WEIGHT:
        return 0.0
    source = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
    if not 0 <= source < schedule.stages:
        return 0.0
    kinds = (Kind.FORWARD,) if action.kind is Kind.FORWARD else (Kind.BACKWARD, Kind.INPUT)
    sources = [Action(kind, source, action.micro_batch) for kind in kinds]
    delay = transfer if schedule.stage_rank[source] != schedule.stage_rank[action.stage] else 0.0
    return max(ends[action] for action in sources if action in ends) + delay
