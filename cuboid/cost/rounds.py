"""The time of the rounds of islands: what a slow link costs a training, computed as the engine does it.

After a step that a round is due at, the training encodes a fragment. A thread of its own then does one round after
another: it hears that all have arrived, fetches from all other islands at once, hears that all have it, and steps.
`delay` steps later the training applies the result, and waits for it where it is not there yet. So a transfer is hidden
as long as it ends in those steps, and rounds queue where a link is slower than they begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cuboid.spec.islands import IslandsSpec

EFFICIENCY = 0.88
"""Of a link's rate that blocks get while both directions are busy: headers of packets, acknowledgements, and congestion
control. Measured between two hosts in network namespaces, 50 Mbit/s to 2 Gbit/s: 0.86 to 0.92."""
FIRST_WINDOW = 10 * 1448
"""Bytes that a TCP connection sends before the first acknowledgement; it doubles with each round trip, and begins anew
after a pause."""


@dataclass(frozen=True)
class IslandTimes:
    """Of one island, in seconds."""

    step: float
    encode: float = 0.0
    """Between two steps: bring a fragment to its owners and encode it."""
    outer: float = 0.0
    """In the thread, beside the training: decode and step."""
    apply: float = 0.0
    """Between two steps: bring a fragment back."""


@dataclass(frozen=True)
class RoundTimes:
    """When a round does what, in seconds since the first step began."""

    round: int
    fragment: int
    due: int
    """The step after which it begins."""
    arrived: tuple[float, ...]
    """When each island had encoded its fragment."""
    fetched: tuple[float, float]
    """When the transfer begins and ends."""
    done: float
    applied: tuple[float, ...]
    """When each island applied it."""
    waited: tuple[float, ...]
    """How long each island's training stood still for it."""

    @property
    def hidden(self) -> float:
        """The fraction of it, from the last arrival until it is done, in which no training waited."""
        whole = self.done - max(self.arrived)
        return 1 - min(max(self.waited), whole) / whole if whole > 0 else 1.0


@dataclass(frozen=True)
class Timeline:
    """A training of islands over time."""

    islands: tuple[IslandTimes, ...]
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    """For each island when each step began; the last one: when all was over."""
    rounds: tuple[RoundTimes, ...] = field(repr=False)


def rounds_over_time(
    spec: IslandsSpec, steps: int, islands: Sequence[IslandTimes], transfers: Sequence[float], decide: float
) -> Timeline:
    """`transfers`: seconds in which a fragment is fetched by all. `decide`: seconds between the last arrival and the
    fetch, and again between the fetch and the step."""
    course = _Course(spec, steps, tuple(islands), tuple(transfers), decide)
    last = spec.rounds_due(steps, steps)[-1]
    due = [spec.due(round_, steps) for round_ in range(last + 1)]
    done = 0
    for step in sorted({*due, *(spec.applied(round_, steps) for round_ in range(last + 1)), steps}):
        course.take(step - done)
        done = step
        # As the engine between two steps: apply what is due by now, begin what is due, apply that without a delay.
        course.apply(step)
        for round_ in spec.rounds_due(step, steps):
            course.begin(round_)
        course.apply(step)
    return course.timeline()


@dataclass
class _Course:
    """Islands on their way through a training."""

    spec: IslandsSpec
    steps: int
    islands: tuple[IslandTimes, ...]
    transfers: tuple[float, ...]
    decide: float

    def __post_init__(self) -> None:
        self.clocks = [0.0 for _ in self.islands]
        self.free = 0.0
        """When the threads are done with all rounds begun so far."""
        self.starts: list[list[float]] = [[] for _ in self.islands]
        self.flying: deque[tuple[int, tuple[float, ...], tuple[float, float], float]] = deque()
        self.rounds: list[RoundTimes] = []

    def take(self, steps: int) -> None:
        """Steps with nothing between them."""
        for island, times in enumerate(self.islands):
            begin = self.clocks[island]
            self.starts[island] += [begin + step * times.step for step in range(steps)]
            self.clocks[island] = begin + steps * times.step

    def begin(self, round_: int) -> None:
        self.clocks = [clock + times.encode for clock, times in zip(self.clocks, self.islands, strict=True)]
        start = max(max(self.clocks) + self.decide, self.free)
        end = start + self.transfers[self.spec.fragment_of(round_)]
        self.free = end + self.decide + max(times.outer for times in self.islands)
        self.flying.append((round_, tuple(self.clocks), (start, end), self.free))

    def apply(self, step: int) -> None:
        while self.flying and self.spec.applied(self.flying[0][0], self.steps) <= step:
            round_, arrived, fetched, done = self.flying.popleft()
            waited = tuple(max(0.0, done - clock) for clock in self.clocks)
            for island, times in enumerate(self.islands):
                self.clocks[island] += waited[island] + times.apply
            fragment, due = self.spec.fragment_of(round_), self.spec.due(round_, self.steps)
            self.rounds.append(RoundTimes(round_, fragment, due, arrived, fetched, done, tuple(self.clocks), waited))

    def timeline(self) -> Timeline:
        starts = tuple((*own, clock) for own, clock in zip(self.starts, self.clocks, strict=True))
        return Timeline(self.islands, starts, tuple(self.rounds))


def transfer_seconds(sent: float, rate: float, latency: float, connections: int = 1) -> float:
    """Of so many bytes over a link: the windows of its connections grow until they fill it."""
    rate *= EFFICIENCY
    trip, window, seconds = 2 * latency, float(FIRST_WINDOW * connections), 0.0
    while 0 < window < min(rate * trip, sent):
        sent, seconds, window = sent - window, seconds + trip, 2 * window
    return seconds + sent / rate + latency


@dataclass(frozen=True)
class Prediction:
    computing: float
    """The fraction of time in which steps were computed."""
    waited: float
    """Seconds of each step, on average, for which the training waited for rounds."""
    hidden: float
    """The fraction of rounds, from the last arrival until they are done, that no training waited for."""
    timeline: Timeline = field(repr=False)


def predict_computing(
    *,
    fragment_bytes: float | Sequence[float],
    islands: int,
    link_bytes_per_second: float,
    latency: float,
    step_seconds: float | Sequence[float],
    every: int,
    fragments: int,
    delay: int,
    ramp_steps: int = 0,
    encode_seconds: float = 0.0,
    outer_seconds: float = 0.0,
    apply_seconds: float = 0.0,
    connections: int = 1,
    steps: int = 0,
    skip: int = -1,
) -> Prediction:
    """The share of time that islands compute, that of the one that computes least.

    `fragment_bytes`: what one island sends to each other one in a round, of all fragments or of each.
    `link_bytes_per_second`: of each island's link in each direction, shared by all it sends to. `latency`: seconds in
    one direction. `step_seconds`: of a training step, of all islands or of each. `encode_seconds` and `apply_seconds`
    stop the training in every round, `outer_seconds` does not. `connections`: of all ranks of an island that fetch at
    once. `steps`, `skip`: of the training, and those before what is measured; default: as if it never ended, where no
    ramp counts."""
    spec = IslandsSpec(
        count=islands, every=every, ramp_steps=ramp_steps if steps else 0, fragments=fragments, delay=delay
    )
    sizes = list(fragment_bytes) if isinstance(fragment_bytes, Sequence) else [fragment_bytes] * fragments
    own_steps = list(step_seconds) if isinstance(step_seconds, Sequence) else [step_seconds] * islands
    times = [IslandTimes(each, encode_seconds, outer_seconds, apply_seconds) for each in own_steps]
    peers = islands - 1
    transfers = [
        transfer_seconds(peers * size, link_bytes_per_second, latency, peers * connections) + latency for size in sizes
    ]
    decide = 2 * latency  # there and back, to the coordinator
    if not steps:
        return endless(spec, times, transfers, decide)
    return summary(
        rounds_over_time(spec, steps, times, transfers, decide), min(every, steps - 1) if skip < 0 else skip, steps
    )


def endless(spec: IslandsSpec, islands: Sequence[IslandTimes], transfers: Sequence[float], decide: float) -> Prediction:
    """Of a training that never ends, from its fourth interval on."""
    # One interval more, so that the rounds after the very last step are none of those that are counted.
    return summary(rounds_over_time(spec, 9 * spec.every, islands, transfers, decide), 4 * spec.every, 8 * spec.every)


def summary(timeline: Timeline, skip: int, steps: int) -> Prediction:
    """Of the steps after the first ones."""
    fractions, waits = [], []
    for own, starts in zip(timeline.islands, timeline.starts, strict=True):
        taken, span = steps - skip, starts[steps - 1] + own.step - (starts[skip - 1] + own.step if skip else 0.0)
        fractions.append(own.step * taken / span)
        waits.append(span / taken - own.step)
    counted = [each.hidden for each in timeline.rounds if skip < each.due <= steps]
    hidden = sum(counted) / len(counted) if counted else 1.0
    return Prediction(min(fractions), max(waits), hidden, timeline)
