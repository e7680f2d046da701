"""One clock for all ranks of a step.

Processes of one host read the same clock. Clocks of several hosts are first put on the time of day, which may be off by
milliseconds, and then so that messages between them take as long one way as the other: what is left is off by at most
half of the quickest there and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median


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
