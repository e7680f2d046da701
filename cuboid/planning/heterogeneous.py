"""Step time and memory of one job over groups of different accelerators, for each pipeline rank of each replica.

A line is a set of replicas whose pipelines run through the same groups. A line may stay in one group, or have its first
stages on one accelerator type and its last ones on another. All lines have the same layers per stage, because gradients
are summed stage by stage. The ranks of a tensor group are always in one group of the file. Messages and gradients
between groups share the links of the cluster file; the sum of gradients there is assumed not to overlap with
anything."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from cuboid.cost.inputs import Jobs, Shape, single
from cuboid.cost.layers import transfer_bytes
from cuboid.cost.sharding import rank_parameters
from cuboid.planning.question import Question
from cuboid.planning.refine import StageSeconds, memory_table, short_counts, stage_seconds
from cuboid.planning.score import score
from cuboid.planning.space import Space
from cuboid.planning.stages import Held, LayerSeconds, held
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, Timeline, simulate
from cuboid.spec.groups import Groups
from cuboid.spec.layout import Layout

ONCE = {0: 8.0, 1: 6.0, 2: 2.0, 3: 0.0}
"""ZeRO stage -> bytes of each parameter that cross a link once a step: gradients in float32, parameters in 16 bits."""
EACH_TIME = {0: 0.0, 1: 0.0, 2: 4.0, 3: 8.0}
"""ZeRO stage -> bytes that cross it in each micro-batch."""


@dataclass(frozen=True)
class Line:
    """Replicas whose pipelines run through the same groups."""

    groups: tuple[int, ...]
    """The group of each pipeline rank, by its index in the file."""
    replicas: int


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One pipeline rank of the replicas of a line."""

    line: int
    rank: int
    """Pipeline rank."""
    group: str
    replicas: int
    layers: int
    micro_batches: int
    sequences: int
    """Of a micro-batch."""
    seconds: float
    """Of a micro-batch, forward and backward."""
    idle: float
    """The fraction of a step in which it computes nothing."""
    memory: float
    """Peak bytes."""
    room: float
    """Bytes that it may hold."""


@dataclass(frozen=True, kw_only=True)
class HeterogeneousJob:
    layout: Layout
    lines: tuple[Line, ...]
    pipeline_ranks: tuple[PipelineRank, ...]
    spans: tuple[float, ...]
    """Of each line: seconds until its micro-batches are done."""
    gradients: float
    """Seconds in which gradients and parameters travel within groups."""
    crossing: float
    """Seconds in which they travel between groups."""
    update: float
    tokens: int
    """Of a step."""

    @property
    def step_seconds(self) -> float:
        return max(self.spans) + self.gradients + self.crossing + self.update

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def waiting(self) -> float:
        """The fraction of the passes that the first line to finish waits for the last."""
        return 1 - min(self.spans) / max(self.spans)

    @property
    def fits(self) -> bool:
        return all(here.memory <= here.room for here in self.pipeline_ranks)

    def order(self) -> list[int]:
        """The group of every rank."""
        return rank_groups(self.lines, self.layout)


def rank_groups(lines: Sequence[Line], layout: Layout) -> list[int]:
    """The group of every rank: lines in their order within each stage."""
    each = layout.cp * layout.tp
    return [line.groups[stage] for stage in range(layout.pp) for line in lines for _ in range(line.replicas * each)]


@dataclass(frozen=True)
class Machines:
    """The groups, each with the question that the planner answers for it."""

    groups: Groups
    questions: tuple[Question, ...]

    @property
    def first(self) -> Question:
        return self.questions[0]

    @cached_property
    def names(self) -> list[str]:
        return [group.name for group in self.groups.groups]

    def link(self, one: int, other: int) -> tuple[float, float]:
        """Bytes a second in each direction, and latency in seconds."""
        here, there = self.groups.groups[one], self.groups.groups[other]
        link = self.groups.link(here, there)
        rates = [link.rate]
        if here.site != there.site:
            rates += [rate for group in (here, there) if (rate := self.groups.uplink(group)) is not None]
        return min(rates), link.latency

    def direction(self, one: int, other: int) -> tuple[str, str, bool]:
        """Names one direction of a link: the two sites, and within one site which way."""
        here, there = self.groups.groups[one].site, self.groups.groups[other].site
        return here, there, one < other if here == there else True


def predict_job(machines: Machines, layout: Layout, lines: Sequence[Line]) -> HeterogeneousJob:
    """Predict a layout whose replicas are those of the lines, in order."""
    question, lines = machines.first, _by_weights(layout, lines)
    part = held(question.model, layout, question.sequence)
    sent = _message_bytes(question, layout)
    senders = _senders(machines, lines, part)
    spans, rows, data, update, first = [], [], [0.0], [0.0], 0
    for line in lines:
        alike, batch = layout.as_replica(first, question.global_batch)
        asked = {group: replace(machines.questions[group], global_batch=batch) for group in set(line.groups)}
        known = {group: stage_seconds(each, alike) for group, each in asked.items()}
        share = share_of(layout, first)
        tables = {group: memory_table(each, alike, share) for group, each in asked.items()}
        count = batch // (alike.dp * alike.micro_batch)
        costs = _costs(line, part, known)
        message = sent * layout.micro_batch_of(first)
        delays = _delays(machines, line, part, known, senders, message)
        works, waits = _received(question, line, part, costs, delays)
        spans.append(max(_span(alike, works, waits, count), count * _busiest_link(machines, lines, part, message)))
        for each in asked.values():
            parts = score(each, Space.of([alike], each)).parts
            data.append(float(parts["data"][0]))
            update.append(float(parts["optimizer"][0]))
        totals = np.array(costs.forward) + np.array(costs.input_backward) + np.array(costs.weight_backward)
        rows.append((line, alike, count, part.by_rank(totals), asked, tables))
        first += line.replicas
    crossing = crossing_seconds(machines, layout, lines, part)
    step = max(spans) + max(data) + crossing + max(update)
    pipeline_ranks = [
        PipelineRank(
            line=place,
            rank=rank,
            group=machines.names[group],
            replicas=line.replicas,
            layers=int(part.layers[rank]),
            micro_batches=count,
            sequences=alike.micro_batch,
            seconds=float(each[rank]),
            idle=max(1 - count * float(each[rank]) / step, 0.0),
            memory=sum(tables[group][rank].values()),
            room=asked[group].limit,
        )
        for place, (line, alike, count, each, asked, tables) in enumerate(rows)
        for rank, group in enumerate(line.groups)
    ]
    return HeterogeneousJob(
        layout=layout,
        lines=tuple(lines),
        pipeline_ranks=tuple(pipeline_ranks),
        spans=tuple(spans),
        gradients=max(data),
        crossing=crossing,
        update=max(update),
        tokens=question.global_batch * question.sequence,
    )


def _by_weights(layout: Layout, lines: Sequence[Line]) -> tuple[Line, ...]:
    """Lines split so that all replicas of one have the same weights."""
    found, first = [], 0
    for line in lines:
        own = range(first, first + line.replicas)
        weights = [(layout.weight_of(each), layout.shard_weight_of(each)) for each in own]
        found += [Line(line.groups, len(list(same))) for _, same in groupby(weights)]
        first += line.replicas
    return tuple(found)


def line_timeline(machines: Machines, job: HeterogeneousJob, place: int, count: int) -> Timeline:
    """The simulated timeline of `count` micro-batches of a replica of one line."""
    layout, line, question = job.layout, job.lines[place], machines.first
    first = sum(each.replicas for each in job.lines[:place])
    part, sent = held(question.model, layout, question.sequence), _message_bytes(question, layout)
    alike, batch = layout.as_replica(first, question.global_batch)
    known = {
        group: stage_seconds(replace(machines.questions[group], global_batch=batch), alike)
        for group in set(line.groups)
    }
    senders = _senders(machines, job.lines, part)
    delays = _delays(machines, line, part, known, senders, sent * layout.micro_batch_of(first))
    works, waits = _received(question, line, part, _costs(line, part, known), delays)
    return simulate(make_schedule(layout.schedule, layout.pp, count, layout.vpp), works, waits)


def layer_seconds(machines: Machines, job: HeterogeneousJob) -> dict[str, float]:
    """Group -> seconds of a layer of one sequence, forward and backward, on average; of groups that have ranks."""
    layout, found, first = job.layout, {}, 0
    for line in job.lines:
        alike, batch = layout.as_replica(first, machines.first.global_batch)
        first += line.replicas
        for group in dict.fromkeys(line.groups):
            question = replace(machines.questions[group], global_batch=batch)
            times = LayerSeconds.of(question, Space.of([alike], question).jobs).times
            each = single(times.mean("total", 0)) + single(times.mean("total", 1))
            found[machines.names[group]] = each / alike.micro_batch
    return found


Direction = tuple[str, str, bool]


def _all_hops(machines: Machines, lines: Sequence[Line], part: Held) -> Counter[Direction]:
    """How many replicas send over a link in one direction in a micro-batch: activations forward, gradients back."""
    found: Counter[Direction] = Counter()
    for line in lines:
        for one, other in _hops(line, part):
            found[machines.direction(one, other)] += line.replicas
            found[machines.direction(other, one)] += line.replicas
    return found


def _senders(machines: Machines, lines: Sequence[Line], part: Held) -> Counter[Direction]:
    """How many replicas send over a link in one direction."""
    found: Counter[Direction] = Counter()
    for line in lines:
        for way in {machines.direction(*pair) for hop in _hops(line, part) for pair in (hop, hop[::-1])}:
            found[way] += line.replicas
    return found


def share_of(layout: Layout, replica: int) -> float:
    """The size of its ZeRO shard, relative to the mean."""
    if not layout.shard_weights:
        return 1.0
    return layout.shard_weight_of(replica) * layout.shard_size / sum(layout.shard_weights)


def _hops(line: Line, part: Held) -> list[tuple[int, int]]:
    """Pairs of groups between which the messages of a micro-batch cross, forward."""
    steps = [(line.groups[one], line.groups[other]) for one, other in pairwise(part.rank)]
    return [(one, other) for one, other in steps if one != other]


def _message_bytes(question: Question, layout: Layout) -> float:
    """Bytes of one sequence between two stages, all tensor ranks of a replica together."""
    alone = layout.changed(batch_weights=(), micro_batch=1)
    jobs = Jobs.of([alone], global_batch=alone.batch_unit, sequence=question.sequence)
    each = single(transfer_bytes(Shape.of(question.model), jobs, question.profile))
    return each * layout.tp * layout.cp


def _costs(line: Line, part: Held, known: dict[int, StageSeconds]) -> StageCosts:
    costs = [known[line.groups[rank]].costs for rank in part.rank]
    return StageCosts(
        forward=tuple(each.forward[stage] for stage, each in enumerate(costs)),
        input_backward=tuple(each.input_backward[stage] for stage, each in enumerate(costs)),
        weight_backward=tuple(each.weight_backward[stage] for stage, each in enumerate(costs)),
    )


def _delays(
    machines: Machines,
    line: Line,
    part: Held,
    known: dict[int, StageSeconds],
    senders: Counter[Direction],
    sent: float,
) -> list[float]:
    """Seconds of a message between each two neighbouring stages. All replicas send over a link at the same time, each
    one message after another."""
    found = []
    for one, other in pairwise(part.rank):
        here, there = line.groups[one], line.groups[other]
        if here == there:
            found.append(known[here].message if one != other else 0.0)
            continue
        rate, latency = machines.link(here, there)
        found.append(senders[machines.direction(here, there)] * sent / rate + latency)
    return found


def _received(
    question: Question, line: Line, part: Held, costs: StageCosts, delays: Sequence[float]
) -> tuple[StageCosts, list[float]]:
    """Of an engine whose stages compute nothing while a message arrives from another group: it is work of the stage
    that receives it."""
    waits = list(delays)
    if not question.profile.transfer_stops:
        return costs, waits
    forward, backward = list(costs.forward), list(costs.input_backward)
    for stage, (one, other) in enumerate(pairwise(part.rank)):
        if line.groups[one] != line.groups[other]:
            forward[stage + 1] += waits[stage]
            backward[stage] += waits[stage]
            waits[stage] = 0.0
    return replace(costs, forward=tuple(forward), input_backward=tuple(backward)), waits


def _busiest_link(machines: Machines, lines: Sequence[Line], part: Held, sent: float) -> float:
    """Seconds in which one micro-batch of every replica occupies the busiest direction of a link."""
    crossings = _all_hops(machines, lines, part)
    rates = {
        machines.direction(*pair): machines.link(*pair)[0]
        for line in lines
        for one, other in _hops(line, part)
        for pair in ((one, other), (other, one))
    }
    return max((count * sent / rates[direction] for direction, count in crossings.items()), default=0.0)


def _span(layout: Layout, costs: StageCosts, delays: list[float], count: int) -> float:
    """Seconds of `count` micro-batches, simulated with the schedule's table."""
    busiest = _busiest(layout, costs)
    if layout.stages == 1:
        return count * busiest
    low, high = short_counts(layout.pp, count, layout.schedule == "gpipe")

    def span(some: int) -> float:
        return simulate(make_schedule(layout.schedule, layout.pp, some, layout.vpp), costs, delays).makespan

    short = span(low)
    if high == low:
        return short
    longer = span(high)
    return longer + max((longer - short) / (high - low), busiest) * (count - high)


def _busiest(layout: Layout, costs: StageCosts) -> float:
    totals = np.array(costs.forward) + np.array(costs.input_backward) + np.array(costs.weight_backward)
    return max(float(sum(totals[stage] for stage in layout.stages_of(rank))) for rank in range(layout.pp))


def crossing_seconds(machines: Machines, layout: Layout, lines: Sequence[Line], part: Held) -> float:
    """Seconds of gradients and parameters on the links between groups: a ring over the replicas for each stage."""
    if len(lines) == 1:
        return 0.0
    question = machines.first
    alone = Jobs.of([Layout()], global_batch=1, sequence=question.sequence)
    held_here = rank_parameters(Shape.of(question.model), alone, part.layers, *part.ends()).total
    count = layout.micro_batches_of(layout.busiest_replica, question.global_batch)
    each = (ONCE[layout.zero] + EACH_TIME[layout.zero] * count) * (layout.dp - 1) / layout.dp
    crossed: defaultdict[Direction, float] = defaultdict(float)
    leaving: defaultdict[str, float] = defaultdict(float)
    links: dict[Direction, tuple[float, float]] = {}
    for rank in range(layout.pp):
        ring = [line.groups[rank] for line in lines]
        for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
            if here == there:
                continue
            direction = machines.direction(here, there)
            crossed[direction] += each * float(held_here[rank])
            links[direction] = machines.link(here, there)
            if direction[0] != direction[1]:
                leaving[direction[0]] += each * float(held_here[rank])
    found = [sent / links[direction][0] + 2 * links[direction][1] for direction, sent in crossed.items()]
    for group in machines.groups.groups:
        rate = machines.groups.uplink(group)
        if rate is not None and leaving[group.site]:
            found.append(leaving[group.site] / rate)
    return max(found, default=0.0)
