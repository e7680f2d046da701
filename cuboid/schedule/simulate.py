"""When every action of a schedule runs, given how long each stage takes: exact, in one pass over the actions.

A transfer delays its receiver and occupies neither rank: sends overlap with compute, as in the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cuboid.schedule.table import NO_ACTION, Action, Kind, Schedule, Table, program_of, table_of

# How much a rank holds at its fullest moment. It follows from the order of its list alone, not from any timing.


def peak_activations(
    table: Table, held: Sequence[float], kept_after_input: Sequence[float] | None = None
) -> tuple[float, ...]:
    """For each rank the most its activations take at any time.

    `held` is what one micro-batch takes on each stage from its forward to its backward. A split backward lets go of all
    but `kept_after_input` once the input half is done, and of that after the weight half; skipped, all is kept.
    """
    whole = np.array(held, dtype=np.float64)
    kept = whole if kept_after_input is None else np.array(kept_after_input, dtype=np.float64)
    change = {Kind.FORWARD: whole, Kind.BACKWARD: -whole, Kind.INPUT: kept - whole, Kind.WEIGHT: -kept}
    by_port = np.stack([change[kind] for kind in Kind], axis=1).ravel()
    now = np.cumsum(np.where(table.rows == NO_ACTION, 0.0, by_port[table.ports]), axis=1)
    return tuple(now.max(axis=1, initial=0.0).tolist())


def peak_in_flight(table: Table, *, until_input: bool = False) -> tuple[int, ...]:
    """For each rank the most micro-batches in flight at once, counted per stage: two stages' activations count two.

    A micro-batch is in flight from its forward until its backward is whole, or with `until_input` only until its input
    gradient is done.
    """
    one = [1.0] * table.stages
    kept = [0.0] * table.stages if until_input else one
    return tuple(int(peak) for peak in peak_activations(table, one, kept))


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds one micro-batch takes on each stage. A whole backward takes the sum of its two halves."""

    forward: tuple[float, ...]
    input_backward: tuple[float, ...]
    weight_backward: tuple[float, ...]

    @classmethod
    def uniform(
        cls, stages: int, forward: float = 1, input_backward: float = 1, weight_backward: float = 1
    ) -> StageCosts:
        """The same costs on every stage."""
        return cls(
            forward=(forward,) * stages,
            input_backward=(input_backward,) * stages,
            weight_backward=(weight_backward,) * stages,
        )

    def scaled(self, factor: float) -> StageCosts:
        """All of them so many times as long."""
        parts = (self.forward, self.input_backward, self.weight_backward)
        forward, inputs, weights = (tuple(factor * cost for cost in part) for part in parts)
        return StageCosts(forward=forward, input_backward=inputs, weight_backward=weights)

    def by_kind(self) -> list[float]:
        """Costs at 4 × stage + position of the kind in `Kind`, as `Program.steps` refers to them."""
        halves = zip(self.forward, self.input_backward, self.weight_backward, strict=True)
        return [cost for forward, first, second in halves for cost in (forward, first + second, first, second)]


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of the pipeline."""

    schedule: Schedule
    makespan: float
    """Seconds from the first start to the last end."""
    busy: tuple[float, ...]
    """Seconds of work on each rank."""
    _starts: list[float] = field(repr=False)
    _ends: list[float] = field(repr=False)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank the fraction of the makespan in which it does nothing."""
        return tuple(max(0.0, 1 - busy / self.makespan) if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The mean of the ranks' bubbles."""
        return sum(self.bubble) / len(self.busy)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each rank the most micro-batches in flight at once, counted per stage, until their backward is whole."""
        return peak_in_flight(table_of(self.schedule))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every action with its times, so ordered that nothing comes before what it waits for."""
        program = program_of(self.schedule)
        return tuple(
            Event(step[0], action, start, end)
            for step, action, start, end in zip(program.steps, program.actions, self._starts, self._ends, strict=True)
        )


def simulate(schedule: Schedule, costs: StageCosts, transfer: float | Sequence[float] = 0.0) -> Timeline:
    """Run the schedule against a clock.

    `transfer` is the seconds a message takes between neighbouring stages on different ranks: one number, or one per
    boundary, the i-th between stages i and i + 1.
    """
    cost = costs.by_kind()
    delay = _delays(schedule, transfer)
    clock = [0.0] * schedule.ranks
    starts: list[float] = []
    ends = [0.0]
    for rank, kind, after, boundary in program_of(schedule).steps:
        ready, free = ends[after] + delay[boundary], clock[rank]
        # Calling max() here would take a third of the pass.
        start = free if free > ready else ready
        clock[rank] = end = start + cost[kind]
        starts.append(start)
        ends.append(end)
    return Timeline(schedule, max(clock), _busy(schedule, cost), starts, ends[1:])


def _busy(schedule: Schedule, cost: list[float]) -> tuple[float, ...]:
    work = [0.0] * schedule.ranks
    for stage, rank in enumerate(schedule.stage_rank):
        forward, backward = cost[4 * stage : 4 * stage + 2]
        work[rank] += schedule.micro_batches * (forward + backward)
    return tuple(work)


def _delays(schedule: Schedule, transfer: float | Sequence[float]) -> list[float]:
    """Per boundary, and a last zero for actions that wait for no message."""
    boundaries = schedule.stages - 1
    delays = [transfer] * boundaries if isinstance(transfer, (int, float)) else list(transfer)
    if len(delays) != boundaries:
        raise ValueError(f"transfer has {len(delays)} entries for {boundaries} boundaries between stages")
    return [*delays, 0.0]


# Many schedules at once, for a planner: to the bit what `simulate` says of each. All ranks of all of them advance
# together. At each tick every rank runs its next action, if the message for it was sent at an earlier tick; what a tick
# takes hardly depends on how many ranks there are.


@dataclass(frozen=True)
class Timed:
    """A schedule with what its actions and messages take."""

    table: Table
    costs: StageCosts
    transfer: float
    """Seconds of a message between ranks."""


ALWAYS, NEVER, NOWHERE = range(3)
"""Messages that were there before, that never come, and that nobody reads: what actions without one receive or send."""


def makespans(given: Sequence[Timed]) -> list[tuple[float, float]]:
    """Seconds of each schedule if messages took no time, and with the time they take."""
    if not given:
        return []
    ranks = [each.table.ranks for each in given]
    begins = np.cumsum([0, *ranks])
    longest, lanes = max(each.table.rows.shape[1] for each in given), int(begins[-1])
    # By tick, then by rank: what is read together lies together. At its end a rank waits for ever.
    receives, sends = np.full((longest + 1, lanes), NEVER), np.full((longest + 1, lanes), NOWHERE)
    seconds, messages = np.zeros((longest + 1, lanes)), NOWHERE + 1
    for each, begin in zip(given, begins, strict=False):
        where = slice(each.table.rows.shape[1]), slice(begin, begin + each.table.ranks)
        receives[where], sends[where], seconds[where] = (rows.T for rows in _ticking(each, messages))
        messages += 2 * (each.table.stages + 1) * each.table.micro_batches
    delay = np.stack([np.zeros(lanes), np.repeat([each.transfer for each in given], ranks)], axis=1)
    at, clock = np.arange(lanes), np.zeros((lanes, 2))
    sent = np.full((messages, 2), np.inf)  # infinite: not yet
    sent[ALWAYS] = -np.inf
    while True:
        end = sent.take(receives.take(at), axis=0)
        end += delay
        np.maximum(end, clock, out=end)
        end += seconds.take(at)[:, None]
        sent[sends.take(at)] = end  # where a rank waits: not yet
        runs = end[:, 0] < np.inf
        if not runs.any():
            break
        np.copyto(clock, end, where=runs[:, None])
        at += lanes * runs
    for each, begin in zip(given, begins, strict=False):
        done = at[begin : begin + each.table.ranks] // lanes
        if np.any(done < np.count_nonzero(each.table.rows != NO_ACTION, axis=1)):
            program_of(each.table.schedule)  # says who waits for whom
    return [(alone, delayed) for alone, delayed in np.maximum.reduceat(clock, begins[:-1]).tolist()]


def _ticking(given: Timed, begin: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """The message that each action receives, the one it sends, and its seconds. `begin`: the first message."""
    table, kinds = given.table, len(Kind)
    # A boundary before each stage and one behind the last; messages cross those that lie between two ranks.
    crosses = np.diff(table.stage_rank, prepend=table.stage_rank[0], append=table.stage_rank[-1]) != 0
    forwards = 2 * np.arange(table.stages + 1) + begin
    gradients = forwards + 1
    receives, sends = np.full((table.stages, kinds), ALWAYS), np.full((table.stages, kinds), NOWHERE)
    up, down = slice(None, -1), slice(1, None)
    for place, kind in enumerate(Kind):
        number, before, after = (forwards, up, down) if kind is Kind.FORWARD else (gradients, down, up)
        if kind is not Kind.WEIGHT:
            receives[:, place] = np.where(crosses[before], number[before], ALWAYS)
            sends[:, place] = np.where(crosses[after], number[after], NOWHERE)
    batches, ports = np.divmod(table.rows, kinds * table.stages)
    received, sent = receives.ravel()[ports], sends.ravel()[ports]
    for messages in (received, sent):
        messages += 2 * (table.stages + 1) * batches * (messages >= begin)
    received[table.rows == NO_ACTION], sent[table.rows == NO_ACTION] = NEVER, NOWHERE
    return received, sent, np.array(given.costs.by_kind())[ports]


# Draw a simulated schedule in plain text, one row per rank: `print(draw(simulate(schedule, costs)))`.


IDLE = "."


def draw(timeline: Timeline, width: int = 100) -> str:
    """Time runs to the right; `F0` is the forward of micro-batch 0, `F0b` on the rank's second stage; dots are idle.

    The drawing is as narrow as shows every label, and at most `width` columns plus the rank's name.
    """
    schedule = timeline.schedule
    chunks = _chunk_letters(schedule)
    scale = _columns_per_second(timeline, chunks, width)
    rows = [[IDLE] * round(timeline.makespan * scale) for _ in range(schedule.ranks)]
    for event in timeline.events:
        start, end = round(event.start * scale), round(event.end * scale)
        rows[event.rank][start:end] = _text(event, chunks, end - start)
    margin = len(str(schedule.ranks - 1))
    lines = [f"rank {rank:>{margin}} {''.join(row)}" for rank, row in enumerate(rows)]
    return "\n".join([*lines, f"{schedule.name}: bubble {timeline.bubble_fraction:.1%}"])


def _columns_per_second(timeline: Timeline, chunks: list[str], width: int) -> float:
    durations = [event.end - event.start for event in timeline.events if event.end > event.start]
    if not durations:
        return 0.0
    wanted = 1 + max(len(_labels(event, chunks)[0]) for event in timeline.events)
    columns = min(wanted, width * min(durations) / timeline.makespan)
    # Whole columns for the shortest action keep equal actions equally wide.
    return (int(columns) if columns >= 1 else columns) / min(durations)


def _text(event: Event, chunks: list[str], width: int) -> str:
    """The most telling label that fits and leaves a space, or else the bare kind."""
    labels = _labels(event, chunks)
    fitting = [label for label in labels if len(label) < width]
    return (fitting or labels[-1:])[0].ljust(width)[:width]


def _labels(event: Event, chunks: list[str]) -> list[str]:
    kind, batch = event.action.kind.value, event.action.micro_batch
    return [f"{kind}{batch}{chunks[event.action.stage]}", f"{kind}{batch}", kind]


def _chunk_letters(schedule: Schedule) -> list[str]:
    """For each stage a letter that tells it from the other stages of its rank; none where there is only one."""
    if schedule.stages == schedule.ranks:
        return [""] * schedule.stages
    return [chr(ord("a") + schedule.stages_of(rank).index(stage)) for stage, rank in enumerate(schedule.stage_rank)]
