"""A finalist in full: the real schedule table against a clock, with the engine's uneven stages; every rank's memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.inputs import Array, Shape, number, single
from cuboid.cost.memory import Memory, kept_fraction, kept_per_layer, peak_memory, rank_memory
from cuboid.cost.pipeline import in_flight, with_shared_cores
from cuboid.cost.sharding import host_bytes
from cuboid.cost.step import PARTS
from cuboid.planning.question import Question
from cuboid.planning.score import BUSY, Least, Scores, memory_of, score_all
from cuboid.planning.space import Column, Space
from cuboid.planning.stages import held, stage_costs
from cuboid.schedule.schedules import make_table
from cuboid.schedule.simulate import StageCosts, Timed, peak_activations
from cuboid.schedule.simulate import makespans as simulated
from cuboid.spec.layout import RECOMPUTE, Layout
from cuboid.spec.partition import longest_stage

Table = tuple[dict[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Refined:
    """A layout with all that is predicted of it."""

    layout: Layout
    parts: dict[str, float]
    """Where the seconds of a step go; they add up to it."""
    memory: Table
    """For each pipeline rank bytes by kind; they add up to what the rank holds."""
    layers: tuple[int, ...]
    """Layers per stage."""
    bubble: float
    """Fraction of the pipeline's time in which the mean rank does nothing."""
    host_memory: float = 0.0
    """Bytes a rank keeps in CPU memory."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def totals(self) -> list[float]:
        """Bytes on each pipeline rank."""
        return [sum(row.values()) for row in self.memory]

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(self.totals)


@dataclass(frozen=True)
class StageSeconds:
    """What the simulator needs of one layout."""

    costs: StageCosts
    message: float
    """Seconds a message between stages takes, as far as compute does not hide it."""


def stage_seconds(question: Question, layout: Layout) -> StageSeconds:
    """Seconds of every stage for one micro-batch."""
    part = held(question.model, layout, question.sequence)
    costs, hop = stage_costs(
        question.model,
        question.machine,
        layout,
        global_batch=question.global_batch,
        sequence=question.sequence,
        engine=question.profile,
        precision=question.cost_precision,
        layers=part.counts,
    )
    # In 1F1B a micro-batch waits for one message in the steady state; the cost model counts two, partly hidden.
    return StageSeconds(costs, 2 * question.profile.transfer_exposed * hop)


def short_counts(ranks: int, micro_batches: int, gpipe: bool = False) -> tuple[int, int]:
    """Two numbers of micro-batches from which the time of any more follows; equal where all can be simulated."""
    if gpipe or micro_batches <= 4 * ranks:
        return micro_batches, micro_batches
    # Whole rounds apart, because a round that is not full costs an interleaved schedule extra.
    low = ranks + micro_batches % ranks + (ranks if ranks < 8 else 0)
    return low, low + ranks


@dataclass(frozen=True)
class Pipeline:
    """What a simulation is asked of."""

    layout: Layout
    seconds: StageSeconds
    micro_batches: int
    busiest: float
    """Seconds of one micro-batch on the slowest rank."""

    @property
    def counts(self) -> tuple[int, int]:
        """Micro-batches of the two runs that are simulated."""
        return short_counts(self.layout.pp, self.micro_batches, self.layout.schedule == "gpipe")

    def timed(self, micro_batches: int) -> Timed:
        """One of them."""
        layout, seconds = self.layout, self.seconds
        table = make_table(layout.schedule, layout.pp, micro_batches, layout.vpp)
        return Timed(table, seconds.costs, seconds.message)


def makespans(pipelines: Sequence[Pipeline]) -> list[tuple[float, float]]:
    """Seconds of each pipeline without and with the time of messages: all runs of all of them in one simulation."""
    runs = [(pipeline, count) for pipeline in pipelines for count in sorted(set(pipeline.counts))]
    spans = iter(simulated([pipeline.timed(count) for pipeline, count in runs]))
    found = []
    for pipeline in pipelines:
        low, high = pipeline.counts
        short = next(spans)
        alone, delayed = next(spans) if high > low else short
        left, busiest = pipeline.micro_batches - high, pipeline.busiest
        if high > low:
            # A short run may not have met its bottleneck yet: the slowest rank, which no schedule is faster than.
            delayed += max((delayed - short[1]) / (high - low), busiest) * left
        found.append((alone + busiest * left, delayed))
    return found


def actions(layout: Layout, global_batch: int) -> int:
    """How many actions the simulation of a layout goes through: what refining it costs."""
    micro_batches = global_batch // (layout.dp * layout.micro_batch)
    low, high = short_counts(layout.pp, micro_batches, layout.schedule == "gpipe")
    return 3 * layout.stages * (low + high if high > low else high)


def refine(question: Question, known: Sequence[tuple[Scores, int, Table]]) -> list[Refined]:
    """Scored layouts in full, each with its place among the scores and the memory of its ranks."""
    layouts = [scores.space.layout(index) for scores, index, _ in known]
    counts = [question.global_batch // (layout.dp * layout.micro_batch) for layout in layouts]
    pipelines, works = [], []
    for layout, count in zip(layouts, counts, strict=True):
        if layout.pp > 1:
            pipeline, work = _pipeline(question, layout, count)
            pipelines.append(pipeline)
            works.append(work)
    spans = iter(zip(works, makespans(pipelines), strict=True))
    found = []
    for layout, (scores, index, memory) in zip(layouts, known, strict=True):
        parts = {name: float(scores.parts[name][index]) for name in PARTS}
        bubble = 0.0
        if layout.pp > 1:
            work, span = next(spans)
            alone, delayed = (max(each, float(work.max())) for each in span)
            fraction = parts["straggler"] / max(sum(parts[name] for name in (*BUSY, "bubble")), 1e-300)
            parts["bubble"] = max(alone - float(work.max()), 0.0)
            parts["transfer"] = max(delayed - alone, 0.0)
            parts["straggler"] = fraction * sum(parts[name] for name in (*BUSY, "bubble"))
            bubble = float(1 - work.mean() / max(delayed, float(work.max())))
        jobs = Space.of([layout], question).jobs
        away = single(host_bytes(Shape.of(question.model), jobs, question.profile))
        layers = held(question.model, layout, question.sequence).counts
        found.append(Refined(layout=layout, parts=parts, memory=memory, layers=layers, bubble=bubble, host_memory=away))
    return found


def _pipeline(question: Question, layout: Layout, micro_batches: int) -> tuple[Pipeline, Array]:
    """What to simulate, and the seconds of work of each rank."""
    seconds, chip = stage_seconds(question, layout), question.machine.chip
    costs = seconds.costs
    totals = np.array(costs.forward) + np.array(costs.input_backward) + np.array(costs.weight_backward)
    each = held(question.model, layout, question.sequence).by_rank(totals)
    work = micro_batches * with_shared_cores(chip, each, each.mean())
    # A schedule's critical path runs at the speed of ranks that others wait for.
    quick = StageSeconds(costs.scaled(chip.together), seconds.message)
    return Pipeline(layout, quick, micro_batches, chip.together * float(each.max())), work


def memory_table(question: Question, layout: Layout, share: float | None = None) -> Table:
    """Bytes of every pipeline rank; activations as the schedule's own table holds them. `share`: what a replica keeps
    of what ZeRO splits, over the mean; default: that of the one that keeps most."""
    shape, engine = Shape.of(question.model), question.profile
    part = held(question.model, layout, question.sequence)
    micro_batches = question.global_batch // (layout.dp * layout.micro_batch)
    jobs = replace(Space.of([layout], question).jobs, fuller=number(layout.fuller_shard if share is None else share))
    first, last = part.ends()
    ranks = np.arange(layout.pp, dtype=np.float64)
    again = part.recomputed(layout.recompute_layers)
    memory = rank_memory(shape, jobs, engine, part.layers, ranks, first, last, again)
    # Layers that are recomputed more count as the part of one that they keep.
    fraction = kept_fraction(shape, jobs, engine) if layout.recompute_layers else 1.0
    weights = [count - (1 - fraction) * min(layout.recompute_layers, count) for count in part.counts]
    each = memory.activations / (in_flight(jobs, ranks) * part.by_rank(weights))
    kept = [each[rank] * weight for rank, weight in zip(part.rank, weights, strict=True)]
    # A longer run holds no more: every rank is at its fullest when the last one starts.
    _, counted = short_counts(layout.pp, micro_batches, layout.schedule == "gpipe")
    table = make_table(layout.schedule, layout.pp, counted, layout.vpp)
    memory = replace(memory, activations=np.array(peak_activations(table, kept)))
    return tuple(_rows(memory, engine.reserve, layout.pp))


def _rows(memory: Memory, reserve: float, ranks: int) -> Iterator[dict[str, float]]:
    """One for each pipeline rank."""
    names = [item.name for item in fields(memory)]
    columns = [np.broadcast_to(getattr(memory, name), ranks).tolist() for name in names]
    for values in zip(*columns, strict=True):
        yield {**dict(zip(names, values, strict=True)), "reserve": (reserve - 1) * sum(values)}


# Recomputing to the memory there is: where a kind fits and one kind less does not, as few layers of each stage as it
# takes.
#
# What some layers save is at most what all of them would, so a layout that would be too slow with one kind less for all
# is not looked at.


LEAST_LEFT = 0.6
"""Of a layout's seconds at least this fraction is left with one kind less recomputed: a layer's forward pass is a third
of it at most, with what it collectives."""
FULLER = 1.6
"""No schedule keeps so many times the micro-batches that 1F1B does, but GPipe, which is never tried."""
AT_ONCE = 512
"""Layouts whose number of layers is sought together, at first."""
PLACES = 8
"""Mixes are sought for the first so many places of an answer: those further down are not worth their time."""


def may_mix(question: Question, objective: str) -> bool:
    """Whether some layers may be recomputed more than others: the user left it open, this engine computes it, and less
    memory is not all that is asked for."""
    decided = {"recompute", "recompute_layers"} & question.fixed.keys()
    return objective == "time" and question.engine == "cuboid" and not decided


def least_kind(question: Question) -> int:
    """The least kind that is worth sparing layers of. Where blocks are compiled, selective recomputation takes no time
    that could be measured (3B on an H200: 0.357 s a step with it, 0.359 s without), so nothing is won by less of it."""
    return RECOMPUTE.index("full" if question.profile.compiled else "selective")


def promising(question: Question, plain: Scores, reached: float) -> NDArray[np.bool_]:
    """Which layouts might be within `reached` seconds under some schedule if only some layers were recomputed so."""
    found = np.zeros(len(plain.space), dtype=bool)
    where = _may_spare(question, plain.space, plain.even, reached)
    memory = memory_of(question, lighter(plain.space.take(where)))
    too_full = np.where(plain.space.columns["pp"][where] > 1, FULLER, 1.0) * memory > question.limit
    where = where[too_full]
    more = plain.take(where)
    less = score_all(question, lighter(more.space), memory[too_full])
    even = less.even + _fraction(question, more, less) * (more.even - less.even)
    found[where[even <= reached]] = True
    return found


def _may_spare(question: Question, space: Space, seconds: Array, reached: float) -> NDArray[np.intp]:
    """Places of the layouts that might be within `reached` seconds with only as many layers recomputed as their memory
    asks for. `seconds`: with all of them."""
    kinds = space.columns["recompute"] >= least_kind(question)
    where = np.flatnonzero(kinds & (LEAST_LEFT * seconds <= reached))
    some = space.take(where)
    heavy = some.columns["recompute"] == RECOMPUTE.index("full")
    again = np.where(heavy, Least.of(question, some, split=False).again(question), 0.0)
    return where[(LEAST_LEFT + (1 - LEAST_LEFT) * again) * seconds[where] <= reached]


def mixable(question: Question, found: Scores, reached: float) -> Iterator[tuple[Array, Space]]:
    """The layouts that fit and would not with one kind less, the fastest of these first, some at a time with the
    seconds that each does not undercut."""
    more = found.take(np.flatnonzero(found.fits))
    more = more.take(_may_spare(question, more.space, more.seconds, reached))
    memory = memory_of(question, lighter(more.space))
    too_full = memory > min(question.limit, question.profile.usable * question.machine.chip.memory)
    more = more.take(np.flatnonzero(too_full))
    less = score_all(question, lighter(more.space), memory[too_full])
    seconds = less.seconds + _fraction(question, more, less) * (more.seconds - less.seconds)
    seconds = np.where(less.fits, np.inf, seconds)
    order = np.argsort(seconds, kind="stable")
    order = order[seconds[order] <= reached]
    start, count = 0, AT_ONCE
    while start < len(order):
        some = order[start : start + count]
        yield seconds[some], more.space.take(some)
        start, count = start + count, 8 * count  # few of many win anything: they are soon looked at together


def _fraction(question: Question, more: Scores, less: Scores) -> Array:
    """Fraction of the layers that must be recomputed more for the memory, and a layer less than that: no layer frees
    more than what it keeps of all micro-batches in flight, wherever the fullest rank and its fullest moment are."""
    shape, jobs, engine = Shape.of(question.model), more.space.jobs, question.profile
    boundary = engine.kept_boundary * jobs.tokens * shape.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    freed = [
        kept - np.where(jobs.recompute == RECOMPUTE.index("full"), boundary, left)
        for kept, left in zip(
            kept_per_layer(shape, less.space.jobs, engine), kept_per_layer(shape, jobs, engine), strict=True
        )
    ]
    each = engine.reserve * jobs.vpp * in_flight(jobs, np.zeros(())) * np.maximum(*freed)
    layers = np.ceil((less.memory - question.limit) / np.maximum(each, 1.0))
    return np.asarray(np.clip((layers - 1) / _longest(question, more.space), 0.0, 1.0))


def mixed(question: Question, space: Space) -> Scores:
    """The layouts with the fewest layers of each stage recomputed that fit; without those that need them all."""
    shape, most = Shape.of(question.model), _longest(question, space)
    low, high = np.zeros_like(most), most
    while np.any(high - low > 1):
        middle = (low + high + 1) // 2  # where nothing is left between them, what is known to fit
        fits = peak_memory(shape, _with_layers(space, middle).jobs, question.profile) <= question.limit
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return score_all(question, _with_layers(space, high).take(np.flatnonzero(high < most)))


def _with_layers(space: Space, layers: Column) -> Space:
    """The layouts with so many layers of each stage recomputed."""
    return Space({**space.columns, "recompute_layers": layers}, space.global_batch, space.sequence)


def lighter(space: Space) -> Space:
    """The layouts with one kind less recomputed."""
    return Space({**space.columns, "recompute": space.columns["recompute"] - 1}, space.global_batch, space.sequence)


def _longest(question: Question, space: Space) -> Column:
    """Layers of the longest stage of each layout."""
    stages = space.columns["pp"] * space.columns["vpp"]
    sizes = {count: longest_stage(question.model, count, question.sequence) for count in set(stages.tolist())}
    return np.array([sizes[count] for count in stages.tolist()], dtype=np.int64)


def fitted(question: Question, given: Layout, memory: Table) -> tuple[Layout, Table]:
    """With as few layers recomputed as its own ranks, simulated, allow: more than the closed form said, or less; and
    the memory of these. `memory`: that of the given layout."""
    layout = given
    if not layout.recompute_layers:
        more = RECOMPUTE.index(layout.recompute) + 1
        if fullest(memory) <= question.limit or not least_kind(question) <= more < len(RECOMPUTE):
            return given, memory
        layout = replace(layout, recompute=RECOMPUTE[more])
    part = held(question.model, layout, question.sequence)
    low, high = 0, max(part.counts)
    while high - low > 1:
        middle = (low + high) // 2
        fits = fullest(memory_table(question, replace(layout, recompute_layers=middle))) <= question.limit
        low, high = (low, middle) if fits else (middle, high)
    layout = replace(layout, recompute_layers=high if high < max(part.counts) else 0)
    return layout, memory if layout == given else memory_table(question, layout)


def fullest(memory: Table) -> float:
    """Bytes on the fullest rank."""
    return max(sum(row.values()) for row in memory)
