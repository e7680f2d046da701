"""When every action of a schedule runs, given how long each stage takes: exact, in one pass over the actions.

A transfer delays its receiver and occupies neither rank: sends overlap with compute, as in the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy
from numpy.typing import NDArray

from cuboid.schedule.table import Action, Kind, Schedule, program_of, refuse_deadlock, timed_ports

# How much a rank holds at its fullest moment. It follows from the order of its list alone, not from any timing.


def peak_activations(
    schedule: Schedule, held: Sequence[float], kept_after_input: Sequence[float] | None = None
) -> tuple[float, ...]:
    """For each rank the most its activations take at any time.

    `held` is what one micro-batch takes on each stage from its forward to its backward. A split backward lets go of all
    but `kept_after_input` once the input half is done, and of that after the weight half; skipped, all is kept.
    """
    kept = held if kept_after_input is None else kept_after_input
    change = {
        Kind.FORWARD: list(held),
        Kind.BACKWARD: [-size for size in held],
        Kind.INPUT: [rest - size for size, rest in zip(held, kept, strict=True)],
        Kind.WEIGHT: [-rest for rest in kept],
    }
    return tuple(_peak(actions, change) for actions in schedule.actions)


def _peak(actions: Sequence[Action], change: dict[Kind, list[float]]) -> float:
    now = most = 0.0
    for kind, stage, _ in actions:
        now += change[kind][stage]
        if now > most:
            most = now
    return most


def peak_in_flight(schedule: Schedule, *, until_input: bool = False) -> tuple[int, ...]:
    """For each rank the most micro-batches in flight at once, counted per stage: two stages' activations count two.

    A micro-batch is in flight from its forward until its backward is whole, or with `until_input` only until its input
    gradient is done.
    """
    one = [1.0] * schedule.stages
    kept = [0.0] * schedule.stages if until_input else one
    return tuple(int(peak) for peak in peak_activations(schedule, one, kept))


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
        return peak_in_flight(self.schedule)

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


def makespans(schedule: Schedule, costs: StageCosts, transfer: float) -> tuple[float, float]:
    """Seconds of the schedule if messages took no time, and with the time they take. Both in one pass, which walks the
    ranks' lists as `program_of` does and keeps no program: a planner asks once of each of many schedules."""
    ports = timed_ports(schedule, costs.by_kind())
    clock, delayed = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    messages = 2 * schedule.stages * schedule.micro_batches
    sent, delayed_sent = [-1.0] * messages, [0.0] * messages  # message -> when it was sent; negative: not yet
    waiting: dict[int, int] = {}  # message -> the rank that waits for it
    left = [iter(actions) for actions in schedule.actions]
    stopped: list[Action | None] = [None] * schedule.ranks
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        free, delayed_free = clock[rank], delayed[rank]
        row, action = left[rank], stopped[rank]
        for kind, stage, micro_batch in row if action is None else chain((action,), row):
            seconds, receives, sends = ports[kind][stage]
            if receives is not None:
                message = receives + micro_batch
                ready = sent[message]
                if ready < 0:
                    waiting[message], stopped[rank] = rank, Action(kind, stage, micro_batch)
                    break
                # Calling max() here would take a third of the pass.
                if ready > free:
                    free = ready
                ready = delayed_sent[message] + transfer
                if ready > delayed_free:
                    delayed_free = ready
            free += seconds
            delayed_free += seconds
            if sends is not None:
                message = sends + micro_batch
                sent[message], delayed_sent[message] = free, delayed_free
                if message in waiting:
                    runnable.append(waiting.pop(message))
        else:
            stopped[rank] = None
        clock[rank], delayed[rank] = free, delayed_free
    refuse_deadlock(schedule, stopped)
    return max(clock), max(delayed)


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


def makespan_many(
    schedule: Schedule, costs: NDArray[numpy.float64], transfer: NDArray[numpy.float64]
) -> NDArray[numpy.float64]:
    """Makespans of one schedule under many costs at once, in one pass.

    costs[n, stages, 3] holds forward, input backward and weight backward; transfer[n] the seconds between ranks.
    """
    forward, first, second = (numpy.ascontiguousarray(costs[:, :, kind].T) for kind in range(3))
    by_kind = {Kind.FORWARD: forward, Kind.BACKWARD: first + second, Kind.INPUT: first, Kind.WEIGHT: second}
    cost = [by_kind[kind][stage] for stage in range(schedule.stages) for kind in Kind]
    steps = program_of(schedule).steps
    awaited = {after for _, _, after, _ in steps}
    clock = [numpy.zeros(len(transfer))] * schedule.ranks
    sent: dict[int, NDArray[numpy.float64]] = {}
    for number, (rank, kind, after, _) in enumerate(steps, start=1):
        start = clock[rank]
        if after:
            # Each message has one receiver, so its time can go: memory stays that of the messages in flight.
            start = numpy.maximum(start, sent.pop(after) + transfer)
        clock[rank] = start + cost[kind]
        if number in awaited:
            sent[number] = clock[rank]
    longest: NDArray[numpy.float64] = numpy.max(numpy.stack(clock), axis=0)
    return longest


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
