"""The search for the fastest job over groups of different accelerators: which lines of replicas, and which layout.

It tries data parallelism across groups (every group is a line of its own), pipelines across groups (one line through
all of them), and both together (a line through the groups of each site, or through any part of a few groups), each with
the tensor ranks, micro-batches and recomputation that fit. Stages get layers, and lines get micro-batches, by the speed
of their accelerators, as far as memory allows. A division whose lower bound on the step time is above the best known
time is skipped; the best divisions are simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate, pairwise, product
from math import gcd
from typing import Any

import numpy as np

from cuboid.cost.inputs import Array, Shape, number
from cuboid.cost.memory import rank_memory
from cuboid.errors import UserError
from cuboid.planning.heterogeneous import (
    ONCE,
    HeterogeneousJob,
    Line,
    Machines,
    crossing_seconds,
    predict_job,
    share_of,
)
from cuboid.planning.heterogeneous_batches import share_out
from cuboid.planning.heterogeneous_divisions import cut, line_sets
from cuboid.planning.question import Question
from cuboid.planning.space import Space, divisors
from cuboid.planning.stages import LayerSeconds, held
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.fitting import check
from cuboid.spec.groups import Groups
from cuboid.spec.layout import RECOMPUTE, Layout

SIZES = (1, 2, 4, 8)
TRIED: dict[str, tuple[Any, ...]] = {"tp": SIZES, "micro_batch": SIZES, "zero": (1, 2, 3), "cp": (1,), "vpp": (1,)}
TRIED["schedule"] = ("1f1b", "zb1p")
"""The values that are tried of each of these fields."""
MOST_DIVISIONS = 160
"""Divisions that get layers and batches and whose memory is counted, at most."""
FINALISTS = 4
"""Of these, divisions that are simulated: so many pipelines, so many of replicas, and so many of both."""
FAR = 1.5
"""Divisions whose lower bound is so many times the best time are skipped."""
EQUAL = 0.7
"""The least time of gradient sums with unequal stages, as a fraction of that with equal stages."""
SENT = 2.0
"""Bytes of a number that is sent between stages."""
LARGEST_SHARD = 8
"""The largest ratio of two ZeRO shards."""
Settings = tuple[int, int, str, int]
"""tp, micro_batch, recompute, ep."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro-batch on one type of accelerator."""

    until: tuple[float, ...]
    """Of all layers before each layer, and of all layers."""
    embedding: float
    head: float

    @property
    def whole(self) -> float:
        return self.until[-1] + self.embedding + self.head


@dataclass(frozen=True)
class Division:
    """Lines and settings of a layout, before layers and batches are assigned."""

    lines: tuple[Line, ...]
    settings: Settings
    zero: int
    bound: float
    """A lower bound on the seconds of a step."""

    @property
    def pp(self) -> int:
        return len(self.lines[0].groups)

    @property
    def dp(self) -> int:
        return sum(line.replicas for line in self.lines)


def heterogeneous_job(
    groups: Groups, questions: Sequence[Question], global_batch: int, first: int | None = None
) -> HeterogeneousJob | None:
    """The fastest over two groups or more; None where none fits. `questions`: about each group, in order. `first`: the
    group that has rank 0."""
    machines = Machines(groups, tuple(replace(question, global_batch=global_batch) for question in questions))
    search = _Search(machines, first)
    best = _best(search, (1,))
    return best if best is not None else _best(search, (2, 3))


def _best(search: _Search, zeros: Sequence[int]) -> HeterogeneousJob | None:
    machines = search.machines
    divisions = sorted(search.divisions(zeros), key=lambda each: each.bound)
    found: list[tuple[float, int, Layout, tuple[Line, ...]]] = []
    least = float("inf")
    for place, division in enumerate(divisions[:MOST_DIVISIONS]):
        if division.bound > FAR * least:
            break
        assigned = search.assigned(division)
        if assigned is None:
            continue
        seconds, layout = assigned
        found.append((seconds, place, layout, division.lines))
        least = min(least, seconds)
    best: HeterogeneousJob | None = None
    kinds = {(len(lines) > 1, layout.pp > 1) for _, _, layout, lines in found}
    chosen = [
        each
        for kind in sorted(kinds)
        for each in nsmallest(
            FINALISTS,
            [each for each in found if (len(each[3]) > 1, each[2].pp > 1) == kind],
            key=lambda each: each[:2],
        )
    ]
    for _, _, layout, lines in chosen:
        for each in _schedules(machines.first, layout):
            job = predict_job(machines, each, lines)
            if job.fits and (best is None or job.step_seconds < best.step_seconds):
                best = job
    return best


def _schedules(question: Question, layout: Layout) -> Iterator[Layout]:
    """The layout with each schedule that keeps its layers per rank."""
    if layout.pp == 1:
        yield layout
        return
    for name in TRIED["schedule"]:
        if question.fixed.get("schedule", name) == name:
            yield layout.changed(schedule=name)


class _Search:
    """The search over one cluster file: which divisions there are, and the layers, batches and memory of each."""

    def __init__(self, machines: Machines, first: int | None) -> None:
        self.machines, self.question, self._first = machines, machines.first, first
        self.model, self.batch = machines.first.model, machines.first.global_batch
        self._by_cluster: dict[ClusterSpec, dict[Settings, Seconds]] = {}
        self._held: dict[tuple[ClusterSpec, Layout, int, float], Array] = {}
        tensor, experts = self._tensor(), self._experts()
        choices = list(product(tensor, self._micro_batches(), self._recompute(), experts))
        self._seconds: list[dict[Settings, Seconds]] = []
        self._like: list[ClusterSpec] = []
        for question in machines.questions:
            like = replace(question.cluster, name="")
            if like not in self._by_cluster:
                self._by_cluster[like] = _layer_seconds(question, choices)
            self._seconds.append(self._by_cluster[like])
            self._like.append(like)
        self.node = gcd(*(question.cluster.accelerators_per_node for question in machines.questions))

    def _allowed(self, name: str, options: Sequence[Any]) -> list[Any]:
        fixed = self.question.fixed
        return [value for value in options if fixed.get(name, value) == value]

    def _tensor(self) -> list[int]:
        """Degrees that fit in the nodes of all groups."""
        nodes = [question.cluster.accelerators_per_node for question in self.machines.questions]
        return self._allowed("tp", [tp for tp in TRIED["tp"] if all(node % tp == 0 for node in nodes)])

    def _micro_batches(self) -> list[int]:
        return self._allowed("micro_batch", [size for size in TRIED["micro_batch"] if self.batch % size == 0])

    def _recompute(self) -> list[str]:
        return self._allowed("recompute", RECOMPUTE)

    def _experts(self) -> list[int]:
        experts = self.model.mixture.experts if self.model.mixture else 1
        return self._allowed("ep", [ep for ep in divisors(experts) if ep <= 64])

    def divisions(self, zeros: Sequence[int]) -> Iterator[Division]:
        every = self._seconds
        choices = [settings for settings in every[0] if all(settings in each for each in every)]
        for chosen in self._led(line_sets(self.machines)):
            used = sorted({group for line in chosen for group in line})
            sizes = {group: self.machines.questions[group].cluster.accelerators for group in used}
            for tp in {settings[0] for settings in choices}:
                for lines in cut(chosen, sizes, tp, self.model.layers):
                    if not self._allowed("pp", [len(lines[0].groups)]) or not self._whole_nodes(lines, tp):
                        continue
                    if not self._allowed("dp", [sum(line.replicas for line in lines)]):
                        continue
                    crossing = self._crossing(lines)
                    for settings in choices:
                        if settings[0] == tp and self._spread(lines, settings):
                            bound = self._bound(lines, settings) + crossing
                            for zero in self._allowed("zero", zeros):
                                yield Division(lines, settings, zero, bound)

    def _led(self, sets: Iterator[tuple[tuple[int, ...], ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Only divisions whose first line begins with the group that has rank 0; lines are reordered for it."""
        for chosen in sets:
            if self._first is None or chosen[0][0] == self._first:
                yield chosen
            elif led := [line for line in chosen if line[0] == self._first]:
                yield (*led, *(line for line in chosen if line[0] != self._first))

    def _whole_nodes(self, lines: tuple[Line, ...], tp: int) -> bool:
        """Whether no node has ranks of two groups: in the order of ranks groups change only where a node ends."""
        start, before = 0, -1
        for rank in range(len(lines[0].groups)):
            for line in lines:
                if line.groups[rank] != before and start % self.node:
                    return False
                start, before = start + line.replicas * tp, line.groups[rank]
        return True

    def _spread(self, lines: tuple[Line, ...], settings: Settings) -> bool:
        """Experts stay in the replicas of one line."""
        tp, micro_batch, _, ep = settings
        each = [line.replicas * tp for line in lines]
        return all(ranks % ep == 0 for ranks in each) and self.batch // micro_batch >= sum(
            line.replicas for line in lines
        )

    def _crossing(self, lines: tuple[Line, ...]) -> float:
        """A lower bound on the seconds of gradient sums on links between groups."""
        if len(lines) == 1:
            return 0.0
        pp = len(lines[0].groups)
        crossed: dict[tuple[str, str, bool], float] = {}
        for rank in range(pp):
            ring = [line.groups[rank] for line in lines]
            for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
                if here != there:
                    direction = self.machines.direction(here, there)
                    crossed[direction] = crossed.get(direction, 0.0) + ONCE[1] / self.machines.link(here, there)[0]
        return EQUAL * self.model.parameters / pp * max(crossed.values(), default=0.0)

    def _bound(self, lines: tuple[Line, ...], settings: Settings) -> float:
        """A step in which all accelerators compute all the time, except while the pipeline fills and drains."""
        micro_batch = settings[1]
        speed = sum(
            line.replicas / self._seconds[group][settings].whole for line in lines for group in line.groups
        )  # of stages: micro-batches a second through all layers
        count, pp = self.batch / micro_batch, len(lines[0].groups)
        replicas = sum(line.replicas for line in lines)
        return count / speed * (1 + (pp - 1) / max(count / replicas, 1.0))

    # Assign layers to stages, and micro-batches to lines.

    def assigned(self, division: Division) -> tuple[float, Layout] | None:
        """Seconds, in closed form, and the layout; None where it does not fit or the batch does not divide."""
        caps = [self.model.layers] * division.pp
        for _ in range(4):
            counts = self._layers(division, caps)
            if counts is None:
                return None
            shared = self._share_out(division, counts)
            if shared is None:
                return None
            seconds, batches = shared
            layout = self._layout(division, counts, batches)
            if layout is None:
                return None
            tight = self._tight(division, layout, counts)
            if tight and layout.zero and len(division.lines) > 1:
                other = self._by_memory(division, layout)
                if other is not None and not self._tight(division, other, counts):
                    layout, tight = other, {}
            if not tight:
                part = held(self.model, layout, self.question.sequence)
                return seconds + crossing_seconds(self.machines, layout, division.lines, part), layout
            caps = [min(cap, tight.get(rank, cap)) for rank, cap in enumerate(caps)]
        return None

    def _layers(self, division: Division, caps: Sequence[int]) -> list[int] | None:
        """Layers of each stage: each layer goes to the stage that finishes it first; then layers move away from the
        slowest stage, one at a time, while that makes the job faster."""
        pp, layers = division.pp, self.model.layers
        if pp == 1:
            return [layers] if caps[0] >= layers else None
        if min(caps) < 1 or sum(caps) < layers:
            return None
        tables = [[self._seconds[group][division.settings] for group in line.groups] for line in division.lines]
        total = sum(line.replicas for line in division.lines)
        slow = [
            total
            / sum(line.replicas / table[rank].until[-1] for line, table in zip(division.lines, tables, strict=True))
            for rank in range(pp)
        ]
        each = [value / layers for value in slow]
        ends = [0.0] * pp
        ends[0] += max(table[0].embedding for table in tables)
        ends[-1] += max(table[-1].head for table in tables)
        counts = [1] * pp
        for _ in range(layers - pp):
            open_ranks = [rank for rank in range(pp) if counts[rank] < caps[rank]]
            rank = min(open_ranks, key=lambda rank: (ends[rank] + (counts[rank] + 1) * each[rank], -rank))
            counts[rank] += 1
        rate = self._rate(division, tables, counts)
        for _ in range(layers):
            better = None
            source = self._slowest(tables[0], counts)
            for target in range(pp):
                if target != source and counts[source] > 1 and counts[target] < caps[target]:
                    moved = list(counts)
                    moved[source], moved[target] = moved[source] - 1, moved[target] + 1
                    found = self._rate(division, tables, moved)
                    if found > rate * (1 + 1e-9):
                        rate, better = found, moved
            if better is None:
                return counts
            counts = better
        return counts

    @staticmethod
    def _stage_times(table: Sequence[Seconds], counts: Sequence[int]) -> list[float]:
        stops = [0, *accumulate(counts)]
        times = [each.until[stops[rank + 1]] - each.until[stops[rank]] for rank, each in enumerate(table)]
        times[0] += table[0].embedding
        times[-1] += table[-1].head
        return times

    def _slowest(self, table: Sequence[Seconds], counts: Sequence[int]) -> int:
        times = self._stage_times(table, counts)
        return times.index(max(times))

    def _rate(self, division: Division, tables: Sequence[Sequence[Seconds]], counts: Sequence[int]) -> float:
        """Micro-batches a second."""
        return sum(
            line.replicas / max(self._stage_times(table, counts))
            for line, table in zip(division.lines, tables, strict=True)
        )

    def _share_out(self, division: Division, counts: Sequence[int]) -> tuple[float, tuple[int, ...]] | None:
        """Seconds, and micro-batches of a replica of each line; lines of the same speed have equally many."""
        micro_batch = division.settings[1]
        whole = self.batch // micro_batch
        alike: dict[tuple[float, float], int] = {}
        places = []
        for line in division.lines:
            times = self._stage_times([self._seconds[group][division.settings] for group in line.groups], counts)
            delays, link = self._messages(division, line)
            # 1F1B keeps `pp - rank` micro-batches of a rank in flight.
            trips = [(sum(times[rank:]) + 2 * sum(delays[rank:])) / (division.pp - rank) for rank in range(division.pp)]
            each = max(*times, *trips, link)
            key = (round(sum(times) + 2 * sum(delays) - each, 9), round(each, 9))
            places.append(alike.setdefault(key, len(alike)))
        fills, slopes = zip(*alike, strict=True)
        replicas = [0] * len(alike)
        for place, line in zip(places, division.lines, strict=True):
            replicas[place] += line.replicas
        chosen = share_out(whole, replicas, fills, slopes, equal=division.zero >= 2)
        if chosen is None:
            return None
        seconds = max(fill + slope * count for fill, slope, count in zip(fills, slopes, chosen, strict=True))
        return seconds, tuple(chosen[place] for place in places)

    def _messages(self, division: Division, line: Line) -> tuple[list[float], float]:
        """Seconds of a message between each two neighbouring ranks (0 within a group), and seconds in which the
        messages of all replicas occupy a link."""
        sent = division.settings[1] * SENT * self.question.sequence * self.model.hidden
        crossed: dict[tuple[str, str, bool], int] = {}
        for other in division.lines:
            for here, there in pairwise(other.groups):
                if here != there:
                    for direction in (self.machines.direction(here, there), self.machines.direction(there, here)):
                        crossed[direction] = crossed.get(direction, 0) + other.replicas
        delays, link = [], 0.0
        for here, there in pairwise(line.groups):
            if here == there:
                delays.append(0.0)
                continue
            rate, latency = self.machines.link(here, there)
            fills = (
                max(crossed[self.machines.direction(*pair)] for pair in ((here, there), (there, here))) * sent / rate
            )
            delays.append(fills + latency)
            link = max(link, fills)
        return delays, link

    def _layout(self, division: Division, counts: Sequence[int], batches: Sequence[int]) -> Layout | None:
        tp, micro_batch, recompute, ep = division.settings
        weights = tuple(
            batch for batch, line in zip(batches, division.lines, strict=True) for _ in range(line.replicas)
        )
        fields: dict[str, Any] = {"recompute": recompute, "ep": ep, "zero": division.zero if division.dp > 1 else 0}
        fields |= {name: value for name, value in self.question.fixed.items() if name not in ("schedule", "vpp")}
        fields |= {"dp": division.dp, "tp": tp, "pp": division.pp, "micro_batch": micro_batch, "batch_weights": weights}
        fields["layers"] = tuple(counts) if division.pp > 1 else ()
        try:
            layout = Layout(**fields)
            check(layout, self.model, global_batch=self.batch, sequence=self.question.sequence)
        except UserError:
            return None
        return None if self.question.untrainable(layout) else layout

    def _by_memory(self, division: Division, layout: Layout) -> Layout | None:
        """The layout with ZeRO shards in proportion to the memory that each line has left; None where that cannot
        be."""
        if layout.shard:
            return None
        rooms, first = [], 0
        for line in division.lines:
            alike, batch = layout.as_replica(first, self.batch)
            first += line.replicas
            room = float("inf")
            for group in sorted(set(line.groups)):
                question = self.machines.questions[group]
                without, mean = (self._held_bytes(group, alike, batch, share) for share in (0.0, 1.0))
                for rank, its in enumerate(line.groups):
                    if its == group:  # in shards of the mean size
                        room = min(room, (question.limit - without[rank]) / max(mean[rank] - without[rank], 1.0))
            rooms.append(room)
        if min(rooms) <= 0:
            return None
        weights = [max(1, min(LARGEST_SHARD, int(LARGEST_SHARD * room / max(rooms)))) for room in rooms]
        each = tuple(weight for weight, line in zip(weights, division.lines, strict=True) for _ in range(line.replicas))
        return layout.changed(shard_weights=each)

    def _held_bytes(self, group: int, alike: Layout, batch: int, share: float) -> Array:
        """As `held_bytes`, once for groups that differ only in name."""
        question = self.machines.questions[group]
        key = (self._like[group], alike, batch, share)
        if key not in self._held:
            self._held[key] = held_bytes(replace(question, global_batch=batch), alike, share)
        return self._held[key]

    def _tight(self, division: Division, layout: Layout, counts: Sequence[int]) -> dict[int, int]:
        """Pipeline ranks that exceed their memory -> how many layers would fit."""
        found: dict[int, int] = {}
        first = 0
        for line in division.lines:
            alike, batch = layout.as_replica(first, self.batch)
            share = share_of(layout, first)
            first += line.replicas
            for group in sorted(set(line.groups)):
                question = self.machines.questions[group]
                bytes_of = self._held_bytes(group, alike, batch, share)
                for rank, its in enumerate(line.groups):
                    if its == group and bytes_of[rank] > question.limit:
                        fewer = min(int(counts[rank] * question.limit / bytes_of[rank]), counts[rank] - 1)
                        found[rank] = min(found.get(rank, fewer), fewer)
        return found


def held_bytes(question: Question, layout: Layout, share: float) -> Array:
    """Bytes of every pipeline rank, in closed form. `share`: the size of its ZeRO shard, relative to the mean."""
    part = held(question.model, layout, question.sequence)
    jobs = replace(Space.of([layout], question).jobs, fuller=number(share))
    ranks, engine = np.arange(layout.pp, dtype=np.float64), question.profile
    again = part.recomputed(layout.recompute_layers)
    memory = rank_memory(Shape.of(question.model), jobs, engine, part.layers, ranks, *part.ends(), again)
    return np.asarray(engine.reserve * np.broadcast_to(memory.total, layout.pp))


def _layer_seconds(question: Question, choices: Sequence[Settings]) -> dict[Settings, Seconds]:
    """Of the settings that the model allows."""
    layouts, allowed = [], []
    for settings in choices:
        tp, micro_batch, recompute, ep = settings
        fields: dict[str, Any] = {"tp": tp, "micro_batch": micro_batch, "recompute": recompute, "ep": ep}
        try:
            layout = Layout(dp=max(question.cluster.accelerators // tp, ep), **fields)
            check(layout, question.model, global_batch=layout.batch_unit, sequence=question.sequence)
        except UserError:
            continue
        layouts.append(layout)
        allowed.append(settings)
    if not layouts:
        return {}
    seconds = LayerSeconds.of(question, Space.of(layouts, question).jobs)
    columns = np.broadcast_arrays(
        seconds.dense, seconds.mixture, seconds.parts.embedding, seconds.head, np.zeros(len(layouts))
    )
    leading = question.model.mixture.first_dense_layers if question.model.mixture else question.model.layers
    found = {}
    for settings, dense, mixture, embedding, head in zip(
        allowed, *(each.tolist() for each in columns[:4]), strict=True
    ):
        costs = [dense] * leading + [mixture] * (question.model.layers - leading)
        found[settings] = Seconds((0.0, *accumulate(costs)), embedding, head)
    return found
