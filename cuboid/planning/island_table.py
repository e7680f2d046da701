"""The mildest table [islands] with which the links cost islands less than a twentieth of their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cuboid.cost.rounds import IslandTimes, Prediction, endless
from cuboid.planning.island_links import Paths, Sent, fragment_bytes
from cuboid.planning.plan import Plan
from cuboid.spec.coding import decode
from cuboid.spec.islands import IslandsSpec

COMPUTING = 0.95
"""Fraction of the time that the slowest island should compute."""
EVERY = (32, 64, 128, 256, 512)
"""Steps between synchronisations: the literature's laws are fitted at 30, and a longer interval learns less."""
BITS = (8, 4)
"""What is proven here to learn like data parallelism, then half of that."""
FRAGMENTS = (1, 2, 4, 8, 16)
DELAYS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
LATEST = 4
"""A delay is at most this fraction of the interval: what is mixed in later is old."""

# Seconds of one core for each number that a rank owns, measured with the engine's own operations.
ENCODE = {32: 3e-9, 16: 3e-9, 8: 8.5e-9, 4: 10.7e-9}
"""Subtract, round, and keep what rounding lost: between two steps."""
DECODE, STEP = 21e-9, 14.5e-9
"""Beside the training: what one island has sent, and the outer optimizer's step."""


def island_times(plan: Plan, spec: IslandsSpec) -> IslandTimes:
    """What a round costs one island: its numbers travel to their owners, to CPU memory, and back."""
    question = plan.question
    machine = question.machine
    numbers = question.model.parameters / spec.fragments / plan.layout.world_size
    moved = 4.0 * numbers * (1 / machine.chip.host_link + 1 / machine.fabric.outer_bandwidth)
    return IslandTimes(
        step=plan.seconds,
        encode=moved + ENCODE[spec.bits] * numbers,
        outer=(STEP + DECODE * spec.count) * numbers,
        apply=moved,
    )


def mean_seconds(times: Sequence[IslandTimes], prediction: Prediction) -> float:
    """Of a step on average: all islands take as many in the same time."""
    return min(each.step for each in times) / prediction.computing


def mildest(paths: Paths, chosen: Sequence[Plan], wanted: Mapping[str, Any]) -> tuple[IslandsSpec, float]:
    """The table with which the slowest island computes enough: the shortest interval, then the most bits, the shortest
    delay and the fewest fragments; where none is enough, the one with which it computes most. And seconds of a step."""
    slowest = max(plan.seconds for plan in chosen)
    tables = Tables(paths, chosen)
    too_slow: list[IslandsSpec] = []
    for spec in specs(chosen, wanted):
        if slowest >= COMPUTING * tables.least_seconds(spec) and slowest >= COMPUTING * (found := tables.seconds(spec)):
            return spec, found
        too_slow.append(spec)
    best, least = too_slow[0], tables.seconds(too_slow[0])
    for spec in too_slow[1:]:
        if tables.least_seconds(spec) < least and (found := tables.seconds(spec)) < least:
            best, least = spec, found
    return best, least


class Tables:
    """What a step takes with each table. Neither a fragment's transfer nor a table's seconds are computed twice."""

    def __init__(self, paths: Paths, chosen: Sequence[Plan]) -> None:
        self._paths, self._chosen = paths, chosen
        self._ranks = max(plan.layout.world_size for plan in chosen)
        self._transfers: dict[tuple[int, int], list[float]] = {}
        self._seconds: dict[IslandsSpec, float] = {}

    def seconds(self, spec: IslandsSpec) -> float:
        if spec not in self._seconds:
            times = self._times(spec)
            self._seconds[spec] = mean_seconds(times, endless(spec, times, self._of_links(spec), self._paths.decide))
        return self._seconds[spec]

    def least_seconds(self, spec: IslandsSpec) -> float:
        """Never more than `seconds`, and soon known: the island whose steps and rounds take longest waits in each round
        until it could be done, but for the steps of the delay. Where rounds overlap, what they wait is not counted."""
        times = self._times(spec)
        if spec.ramp_steps:  # rounds are not alike
            return 0.0
        found = 0.0
        for each in times:
            stopped = spec.fragments * (each.encode + each.apply)
            if spec.delay * spec.fragments <= spec.every:
                beside = 2 * self._paths.decide + each.outer - spec.delay * each.step
                stopped += sum(max(0.0, seconds + beside) for seconds in self._of_links(spec))
            found = max(found, each.step + stopped / spec.every)
        return found * (1 - 1e-9)  # sums in another order

    def _times(self, spec: IslandsSpec) -> list[IslandTimes]:
        """Islands whose times are equal are at each step at the same moment, so one of them is enough."""
        return list(dict.fromkeys(island_times(plan, spec) for plan in self._chosen))

    def _of_links(self, spec: IslandsSpec) -> list[float]:
        key = spec.bits, spec.fragments
        if key not in self._transfers:
            islands = len(self._chosen)
            sizes = fragment_bytes(spec, self._chosen[0].question.model)
            of_size = {size: self._paths.seconds([[Sent(size, self._ranks)] * islands] * islands) for size in {*sizes}}
            self._transfers[key] = [of_size[size] for size in sizes]
        return self._transfers[key]


def specs(chosen: Sequence[Plan], wanted: Mapping[str, Any]) -> Iterator[IslandsSpec]:
    model = chosen[0].question.model

    def of(name: str, usual: Sequence[int]) -> Sequence[int]:
        return (wanted[name],) if name in wanted else usual

    most = model.layers + model.prediction_layers + 2
    given = {name: value for name, value in wanted.items() if name not in ("every", "bits", "delay", "fragments")}
    first: IslandsSpec | None = None
    for every in of("every", EVERY):
        for bits in of("bits", BITS):
            for delay in of("delay", [each for each in DELAYS if each * LATEST <= every]):
                for fragments in of("fragments", [each for each in FRAGMENTS if each <= min(most, every)]):
                    if first is None:
                        table = {"every": every, "bits": bits, "delay": delay, "fragments": fragments}
                        first = decode(IslandsSpec, {**table, **given, "count": len(chosen)}, "islands")
                    spec = replace(first, every=every, bits=bits, delay=delay, fragments=fragments)
                    spec.check_model(model)
                    yield spec
