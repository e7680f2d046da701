"""The pipeline of a real step, read from the ranks' own times (`output.keep_timing`)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from cuboid.readers import Unreadable, is_finite, parse_json, plain_file
from cuboid.report.source import Source
from cuboid.schedule.simulate import StageCosts
from cuboid.schedule.table import Action, Kind, Schedule, needed
from cuboid.telemetry.rows import is_metric


@dataclass(frozen=True)
class Reading:
    """What a rank says of its clock."""

    host: str
    clock: float
    """Time of day less the rank's own time."""


@dataclass(frozen=True)
class Sent:
    """A message, each moment in its own rank's time."""

    source: int
    target: int
    left: float
    arrived: float


@dataclass(frozen=True)
class Alignment:
    offset: dict[int, float]
    """Rank -> what to add to its own time."""
    uncertain: float
    """Seconds by which two ranks may still be apart; 0 where all are on one host, infinite where no messages tell."""
    hosts: int


def align(readings: Mapping[int, Reading], messages: Iterable[Sent]) -> Alignment:
    """One clock for all ranks of a step. Processes of one host read the same clock. Clocks of several hosts are first
    put on the time of day, which may be off by milliseconds, and then so that messages between them take as long one
    way as the other: what is left is off by at most half of the quickest there and back."""
    by_host: dict[str, list[float]] = {}
    for reading in readings.values():
        by_host.setdefault(reading.host, []).append(reading.clock)
    offset = {host: median(clocks) for host, clocks in by_host.items()}
    if len(offset) == 1:
        return Alignment(dict.fromkeys(readings, offset[next(iter(offset))]), 0.0, 1)
    quickest: dict[tuple[str, str], float] = {}
    for message in messages:
        pair = readings[message.source].host, readings[message.target].host
        if pair[0] != pair[1]:
            delay = message.arrived + offset[pair[1]] - message.left - offset[pair[0]]
            quickest[pair] = min(delay, quickest.get(pair, delay))
    uncertain = _shift(offset, quickest)
    return Alignment({rank: offset[reading.host] for rank, reading in readings.items()}, uncertain, len(offset))


def _shift(offset: dict[str, float], quickest: dict[tuple[str, str], float]) -> float:
    """Moves the clocks of hosts, neighbour by neighbour; returns the largest error that may be left. Hosts that no
    message joins stay on the time of day, each lot with its first."""
    moved: dict[str, float] = {}
    error: dict[str, float] = {}
    lots = 0
    for first in offset:
        if first in moved:
            continue
        lots += 1
        moved[first], error[first], waiting = 0.0, 0.0, deque([first])
        while waiting:
            known = waiting.popleft()
            for host in offset:
                there, back = quickest.get((known, host)), quickest.get((host, known))
                if host in moved or there is None or back is None:
                    continue
                moved[host] = moved[known] + (back - there) / 2
                error[host] = error[known] + abs(there + back) / 2
                waiting.append(host)
    for host, shift in moved.items():
        offset[host] += shift
    return max(error.values()) if lots == 1 else float("inf")


TAIL = 8 << 20
"""Bytes of a rank's file that are looked at, from its end."""
STEP = re.compile(rb'\{"step": (\d{1,18}),')
NAME = re.compile(r"([FBIW])(\d{1,9})\.(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Done:
    """An action as it was done, in seconds since the step's first action."""

    action: Action
    start: float
    ready: float
    end: float


@dataclass(frozen=True, slots=True)
class Waited:
    """A rank in a collective, from when it waited for the others until it was through."""

    kind: str
    group: str
    start: float
    end: float


@dataclass(frozen=True)
class MeasuredStep:
    step: int
    seconds: float
    """Of the whole step, optimizer included."""
    lanes: dict[int, list[Done]]
    """Global rank -> what it did, in order."""
    alignment: Alignment
    begin: float
    """The first action's start, in seconds of the time of day."""
    hosts: dict[int, str]
    """Global rank -> where it ran."""
    collectives: dict[int, list[Waited]]
    """Global rank -> what it waited in, inside its actions and between them."""

    def pipeline(self, stride: int) -> MeasuredStep:
        """Only the first pipeline, whose ranks are so far apart."""
        lanes = {rank: lane for rank, lane in self.lanes.items() if rank % stride == 0}
        return replace(self, lanes=lanes)

    @property
    def makespan(self) -> float:
        return max(done.end for lane in self.lanes.values() for done in lane)

    @property
    def bubble(self) -> float:
        """The fraction of the pipeline's time in which the mean rank has no work: waits for messages count."""
        span = self.makespan
        busy = [sum(done.end - done.ready for done in lane) for lane in self.lanes.values()]
        return 1 - mean(busy) / span if span else 0.0


def kept_steps(source: Source) -> list[int]:
    """Steps of which rank 0 kept its times, oldest first."""
    return [step for step, _ in _lines(_path(source, 0))]


def measure(source: Source, schedule: Schedule, ranks: list[int], step: int) -> MeasuredStep | None:
    """`ranks`: those of one pipeline or of several. None where one of them has not kept this step, or has kept it of
    another schedule: the layout that the run had then."""
    rows: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        line = next((line for number, line in _lines(_path(source, rank)) if number == step), None)
        if line is None:
            return None
        rows[rank] = _row(_path(source, rank), line)
    lanes = {rank: [_done(entry) for entry in row["actions"]] for rank, row in rows.items()}
    actions = [done.action for lane in lanes.values() for done in lane]
    if (
        not all(lanes.values())
        or any(action.stage >= schedule.stages for action in actions)
        or 1 + max(action.micro_batch for action in actions) != schedule.micro_batches
    ):
        return None
    readings = {rank: Reading(str(row.get("host", "")), float(row.get("clock", 0.0))) for rank, row in rows.items()}
    alignment = align(readings, _messages(schedule, lanes, _stride(source)))
    begin = min(lane[0].start + alignment.offset[rank] for rank, lane in lanes.items())
    moved = {rank: [_moved(done, alignment.offset[rank] - begin) for done in lane] for rank, lane in lanes.items()}
    seconds = max(float(row.get("seconds", 0.0)) for row in rows.values())
    hosts = {rank: told.host for rank, told in readings.items()}
    collectives = {
        rank: [
            Waited(kind, group, start + alignment.offset[rank] - begin, end + alignment.offset[rank] - begin)
            for kind, group, start, end in row.get("collectives", ())
        ]
        for rank, row in rows.items()
    }
    return MeasuredStep(step, seconds, moved, alignment, begin, hosts, collectives)


def measure_all(source: Source, schedule: Schedule, step: int) -> MeasuredStep | None:
    """All ranks of a step."""
    return measure(source, schedule, list(range(source.run.layout.world_size)), step)


def _row(path: Path | None, line: bytes) -> dict[str, Any]:
    """A row of times, with the actions of the schedule as `_done` reads them."""
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and is_metric(row) and isinstance(row.get("host", ""), str):
        actions, waits = row.get("actions"), row.get("collectives", [])
        named = isinstance(actions, list) and all(_is_timed(each, 1) and NAME.fullmatch(each[0]) for each in actions)
        if named and isinstance(waits, list) and all(_is_timed(each, 2) for each in waits):
            return row
    raise Unreadable(path, "is damaged: it holds a row that is none", "remove it")


def _is_timed(entry: object, words: int) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and all(isinstance(word, str) for word in entry[:words])
        and all(map(is_finite, entry[words:]))
    )


def _stride(source: Source) -> int:
    """How far apart the ranks of a pipeline are."""
    return source.run.layout.world_size // source.run.layout.pp


def _path(source: Source, rank: int) -> Path | None:
    path = source.folder / f"timing-{rank:05d}.jsonl" if source.folder is not None else None
    return path if path is not None and path.is_file() else None


def _lines(path: Path | None) -> Iterator[tuple[int, bytes]]:
    if path is None:
        return
    with plain_file(path) as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(max(0, size - TAIL))
        if size > TAIL:
            file.readline()  # the rest of a row
        for line in file:
            if (found := STEP.match(line)) and line.endswith(b"\n"):
                yield int(found[1]), line


def _done(entry: list[Any]) -> Done:
    found = NAME.fullmatch(entry[0])
    assert found, entry
    return Done(Action(Kind(found[1]), int(found[2]), int(found[3])), *map(float, entry[1:4]))


def _moved(done: Done, by: float) -> Done:
    return Done(done.action, done.start + by, done.ready + by, done.end + by)


def _messages(schedule: Schedule, lanes: dict[int, list[Done]], stride: int) -> list[Sent]:
    """Every message: sent when its action ended, there when the action that takes it could begin."""
    ended: dict[tuple[int, int, int, bool], tuple[int, float]] = {}
    for rank, lane in lanes.items():
        for done in lane:
            if done.action.kind is not Kind.WEIGHT:
                forward = done.action.kind is Kind.FORWARD
                ended[rank % stride, done.action.stage, done.action.micro_batch, forward] = rank, done.end
    found = []
    for rank, lane in lanes.items():
        for done in lane:
            message = needed(done.action, schedule)
            if message is not None:
                forward = done.action.kind is Kind.FORWARD
                sender = ended.get((rank % stride, message.source_stage, message.micro_batch, forward))
                if sender is not None:
                    found.append(Sent(sender[0], rank, sender[1], done.ready))
    return found


def stage_costs(schedule: Schedule, step: MeasuredStep) -> tuple[StageCosts, list[float]]:
    """What each stage of one pipeline took for a micro-batch: the median; what messages between stages took: the
    least."""
    took: dict[tuple[int, Kind], list[float]] = {}
    for lane in step.lanes.values():
        for done in lane:
            took.setdefault((done.action.stage, done.action.kind), []).append(done.end - done.ready)

    def of(kind: Kind) -> list[float]:
        return [median(took.get((stage, kind), [0.0])) for stage in range(schedule.stages)]

    whole = of(Kind.BACKWARD)
    costs = StageCosts(
        forward=tuple(of(Kind.FORWARD)),
        input_backward=tuple(first + half / 2 for first, half in zip(of(Kind.INPUT), whole, strict=True)),
        weight_backward=tuple(second + half / 2 for second, half in zip(of(Kind.WEIGHT), whole, strict=True)),
    )
    delays: dict[int, list[float]] = {}
    stages = {rank: schedule.stages_of(position) for position, rank in enumerate(step.lanes)}
    for sent in _messages(schedule, step.lanes, stride=1):
        for boundary in range(schedule.stages - 1):
            if {boundary, boundary + 1} <= {*stages[sent.source], *stages[sent.target]}:
                delays.setdefault(boundary, []).append(sent.arrived - sent.left)
    return costs, [max(0.0, min(delays.get(boundary, [0.0]))) for boundary in range(schedule.stages - 1)]
