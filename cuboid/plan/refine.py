"""A finalist in full: the real schedule table against a clock, with the engine's uneven stages; every rank's memory."""

from dataclasses import dataclass, fields, replace

import numpy as np

from cuboid.cost.communication import transfer
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.memory import Memory, kept_per_layer, rank_memory
from cuboid.cost.step import PARTS, Pass
from cuboid.plan.question import Question
from cuboid.plan.search import BUSY, Scores
from cuboid.plan.space import Space
from cuboid.plan.stages import Held, LayerSeconds, held
from cuboid.schedule.make import make_schedule
from cuboid.schedule.memory import peak_activations
from cuboid.schedule.simulate import StageCosts, simulate
from cuboid.spec.layout import Layout

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
    """Share of the pipeline's time in which the mean rank does nothing."""

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
    jobs = Jobs.of([layout], global_batch=question.global_batch, sequence=question.sequence)
    seconds = LayerSeconds.of(question, jobs)
    part = held(question.model, layout.schedule, layout.pp, layout.vpp, question.sequence)
    forward = part.dense * _one(seconds.times.dense[0].total) + part.mixture * _one(seconds.times.mixture[0].total)
    backward = part.dense * _one(seconds.times.dense[1].total) + part.mixture * _one(seconds.times.mixture[1].total)
    weight = part.dense * _weight(seconds, seconds.times.dense) + part.mixture * _weight(seconds, seconds.times.mixture)
    embedding, head = _one(seconds.parts.embedding), _one(seconds.parts.head_forward)
    forward[0] += 0.3 * embedding
    backward[0] += 0.7 * embedding
    weight[0] += 0.7 * embedding
    forward[-1] += head
    backward[-1] += _one(seconds.parts.head_backward)
    weight[-1] += min(head, _one(seconds.parts.head_backward) / 2)
    costs = StageCosts(forward=tuple(forward), input_backward=tuple(backward - weight), weight_backward=tuple(weight))
    return StageSeconds(costs, _message(question, layout, jobs, seconds))


def _weight(seconds: LayerSeconds, passes: tuple[Pass, Pass]) -> float:
    """The weight half of a layer's backward: as many products as forward has without attention."""
    forward, backward = passes
    return min(_one(forward.compute) - _one(seconds.parts.attention_forward), _one(backward.total) / 2)


def _message(question: Question, layout: Layout, jobs: Jobs, seconds: LayerSeconds) -> float:
    if layout.pp == 1:
        return 0.0
    engine = question.profile
    split = layout.tp if layout.sequence_parallel or engine.transfer_split else 1
    size = 2 * jobs.tokens * question.model.hidden / split
    hop = _one(transfer(question.machine.fabric, size, seconds.times.crosses))
    # In 1F1B a micro-batch waits for one message in the steady state; the cost model counts two, partly hidden.
    return 2 * engine.transfer_exposed * hop


def _one(value: Array) -> float:
    return float(np.ravel(value)[0])


def short_counts(ranks: int, micro_batches: int, gpipe: bool = False) -> tuple[int, int]:
    """Two numbers of micro-batches from which the time of any more follows; equal where all can be simulated."""
    if gpipe or micro_batches <= 4 * ranks:
        return micro_batches, micro_batches
    # Whole rounds apart, because a round that is not full costs an interleaved schedule extra.
    low = ranks + micro_batches % ranks + (ranks if ranks < 8 else 0)
    return low, low + ranks


def makespans(layout: Layout, seconds: StageSeconds, micro_batches: int, busiest: float) -> tuple[float, float]:
    """Seconds of the pipeline without and with the time of messages.

    `busiest` are the seconds of one micro-batch on the slowest rank."""
    low, high = short_counts(layout.pp, micro_batches, layout.schedule == "gpipe")
    short, long = (make_schedule(layout.schedule, layout.pp, count, layout.vpp) for count in (low, high))
    alone = simulate(long, seconds.costs).makespan + busiest * (micro_batches - high)
    delayed = simulate(long, seconds.costs, seconds.message).makespan
    if high > low:
        slope = (delayed - simulate(short, seconds.costs, seconds.message).makespan) / (high - low)
        # A short run may not have met its bottleneck yet: the slowest rank, which no schedule is faster than.
        delayed += max(slope, busiest) * (micro_batches - high)
    return alone, delayed


def actions(layout: Layout, global_batch: int) -> int:
    """How many actions the simulation of a layout goes through: what refining it costs."""
    micro_batches = global_batch // (layout.dp * layout.micro_batch)
    low, high = short_counts(layout.pp, micro_batches, layout.schedule == "gpipe")
    return 3 * layout.stages * (low + high if high > low else high)


def refine(question: Question, scores: Scores, index: int) -> Refined:
    """One of the scored layouts in full."""
    layout = scores.space.layout(index)
    micro_batches = question.global_batch // (layout.dp * layout.micro_batch)
    parts = {name: float(scores.parts[name][index]) for name in PARTS}
    part = held(question.model, layout.schedule, layout.pp, layout.vpp, question.sequence)
    bubble = 0.0
    if layout.pp > 1:
        seconds = stage_seconds(question, layout)
        costs = seconds.costs
        totals = np.array(costs.forward) + np.array(costs.input_backward) + np.array(costs.weight_backward)
        each = part.by_rank(totals)
        work = micro_batches * each
        alone, delayed = makespans(layout, seconds, micro_batches, float(each.max()))
        share = parts["straggler"] / max(sum(parts[name] for name in (*BUSY, "bubble")), 1e-300)
        parts["bubble"] = max(alone - float(work.max()), 0.0)
        parts["transfer"] = max(delayed - alone, 0.0)
        parts["straggler"] = share * sum(parts[name] for name in (*BUSY, "bubble"))
        bubble = float(1 - work.mean() / max(delayed, float(work.max())))
    memory = memory_table(question, layout, part, micro_batches)
    layers = tuple(int(count) for count in part.dense + part.mixture)
    return Refined(layout=layout, parts=parts, memory=memory, layers=layers, bubble=bubble)


def memory_table(question: Question, layout: Layout, part: Held, micro_batches: int) -> Table:
    """Bytes of every pipeline rank; activations as the schedule's own table holds them."""
    shape, engine = Shape.of(question.model), question.profile
    jobs = Space.of([layout], question).jobs
    first, last = part.ends()
    memory = rank_memory(shape, jobs, engine, part.layers, np.arange(layout.pp, dtype=np.float64), first, last)
    dense, mixture = (_one(value) for value in kept_per_layer(shape, jobs, engine))
    split = layout.tp if layout.sequence_parallel else 1
    boundary = 2 * _one(jobs.tokens) * question.model.hidden / split
    full = layout.recompute == "full"
    kept = boundary * (part.dense + part.mixture) if full else dense * part.dense + mixture * part.mixture
    # A longer run holds no more: every rank is at its fullest when the last one starts.
    _, counted = short_counts(layout.pp, micro_batches, layout.schedule == "gpipe")
    schedule = make_schedule(layout.schedule, layout.pp, counted, layout.vpp)
    memory = replace(memory, activations=np.array(peak_activations(schedule, list(kept))))
    return tuple(_row(memory, rank, engine.reserve, layout.pp) for rank in range(layout.pp))


def _row(memory: Memory, rank: int, reserve: float, ranks: int) -> dict[str, float]:
    row = {item.name: float(np.broadcast_to(getattr(memory, item.name), ranks)[rank]) for item in fields(memory)}
    return {**row, "reserve": (reserve - 1) * sum(row.values())}
