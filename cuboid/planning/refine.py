"""A finalist in full: the real schedule table against a clock, with the engine's uneven stages; every rank's memory."""

from dataclasses import dataclass, fields, replace

import numpy as np

from cuboid.cost.inputs import Shape, single
from cuboid.cost.memory import Memory, kept_share, rank_memory
from cuboid.cost.offload import host_bytes
from cuboid.cost.pipeline import in_flight, with_shared_cores
from cuboid.cost.stages import stage_costs
from cuboid.cost.step import PARTS
from cuboid.planning.question import Question
from cuboid.planning.score import BUSY, Scores
from cuboid.planning.space import Space
from cuboid.planning.stages import Held, held
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, peak_activations, simulate
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
    host_memory: float = 0.0
    """Bytes a rank keeps in its host's memory."""

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
    part = held(question.model, layout.schedule, layout.pp, layout.vpp, question.sequence)
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
        chip = question.machine.chip
        each = part.by_rank(totals)
        work = micro_batches * with_shared_cores(chip, each, each.mean())
        # A schedule's critical path runs at the speed of ranks that others wait for.
        quick = StageSeconds(costs.scaled(chip.together), seconds.message)
        spans = makespans(layout, quick, micro_batches, chip.together * float(each.max()))
        alone, delayed = (max(span, float(work.max())) for span in spans)
        share = parts["straggler"] / max(sum(parts[name] for name in (*BUSY, "bubble")), 1e-300)
        parts["bubble"] = max(alone - float(work.max()), 0.0)
        parts["transfer"] = max(delayed - alone, 0.0)
        parts["straggler"] = share * sum(parts[name] for name in (*BUSY, "bubble"))
        bubble = float(1 - work.mean() / max(delayed, float(work.max())))
    memory = memory_table(question, layout, part, micro_batches)
    jobs = Space.of([layout], question).jobs
    away = single(host_bytes(Shape.of(question.model), jobs, question.profile))
    return Refined(layout=layout, parts=parts, memory=memory, layers=part.counts, bubble=bubble, host_memory=away)


def memory_table(question: Question, layout: Layout, part: Held, micro_batches: int) -> Table:
    """Bytes of every pipeline rank; activations as the schedule's own table holds them."""
    shape, engine = Shape.of(question.model), question.profile
    jobs = Space.of([layout], question).jobs
    first, last = part.ends()
    ranks = np.arange(layout.pp, dtype=np.float64)
    again = part.recomputed(layout.recompute_layers)
    memory = rank_memory(shape, jobs, engine, part.layers, ranks, first, last, again)
    # Layers that are recomputed more count as the part of one that they keep.
    share = kept_share(shape, jobs, engine)
    weights = [count - (1 - share) * min(layout.recompute_layers, count) for count in part.counts]
    each = memory.activations / (in_flight(jobs, ranks) * part.by_rank(weights))
    kept = [each[rank] * weight for rank, weight in zip(part.rank, weights, strict=True)]
    # A longer run holds no more: every rank is at its fullest when the last one starts.
    _, counted = short_counts(layout.pp, micro_batches, layout.schedule == "gpipe")
    schedule = make_schedule(layout.schedule, layout.pp, counted, layout.vpp)
    memory = replace(memory, activations=np.array(peak_activations(schedule, kept)))
    return tuple(_row(memory, rank, engine.reserve, layout.pp) for rank in range(layout.pp))


def _row(memory: Memory, rank: int, reserve: float, ranks: int) -> dict[str, float]:
    row = {item.name: float(np.broadcast_to(getattr(memory, item.name), ranks)[rank]) for item in fields(memory)}
    return {**row, "reserve": (reserve - 1) * sum(row.values())}
