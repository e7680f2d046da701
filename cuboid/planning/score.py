"""What layouts cost in closed form, with the engine's own partition: what a search compares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.constants import Engine
from cuboid.cost.estimate import Estimates, estimate_many
from cuboid.cost.inputs import Array, Jobs, Shape, mixes, number, of_size
from cuboid.cost.layers import LayerTimes, Pass, decides_layers, head_seconds, hop
from cuboid.cost.memory import first_memory, kept_per_layer, peak_memory
from cuboid.cost.pipeline import (
    DUAL_PIPE_V,
    bubble,
    idle_by_schedule,
    in_flight,
    least_waited_transfers,
    paired_fraction,
    partition,
    waited_transfers,
    with_shared_cores,
)
from cuboid.cost.reuse import each_once
from cuboid.cost.sharding import rank_parameters, reduction, tied_sum
from cuboid.cost.step import PARTS, first_parameters, replica_time
from cuboid.planning.question import Question
from cuboid.planning.space import DEGREES, Space
from cuboid.planning.stages import LayerSeconds, assumed_slowest, held, real_slowest
from cuboid.spec.layout import RECOMPUTE

BUSY = ("compute", "tensor", "context", "expert", "host")
"""Parts of the step that grow with the layers of the slowest rank."""
CHUNK = 50_000
Memory = Callable[[Shape, Jobs, Engine], Array]


Distinct = bool | Literal["size"]
"""Of layouts with the same ranks, micro-batch and schedule, or with as many ranks in all, only the best counts."""


@dataclass(frozen=True)
class Scores:
    """What layouts cost, in closed form, with the engine's own partition."""

    space: Space
    parts: dict[str, Array]
    memory: Array
    fits: NDArray[np.bool_]
    even: Array
    """Seconds that no schedule and no partition takes away."""

    @cached_property
    def seconds(self) -> Array:
        """Seconds of a step."""
        return sum(self.parts.values(), np.zeros(len(self.space)))

    def take(self, which: NDArray[np.intp]) -> "Scores":
        """Some of them."""
        parts = {name: part.take(which) for name, part in self.parts.items()}
        known = (self.memory.take(which), self.fits.take(which), self.even.take(which))
        return Scores(self.space.take(which), parts, *known)

    def within(self, slowest: float) -> "Scores":
        """Those that take no longer."""
        return self if slowest == float("inf") else self.take(np.flatnonzero(self.seconds <= slowest))

    def order(self, objective: str) -> NDArray[np.intp]:
        """Best first; layouts that cost the same keep the order of the space, so that the answer never varies."""
        keys = (self.seconds, self.memory) if objective == "memory" else (self.memory, self.seconds)
        # Rounding makes layouts that differ by the last bit equal.
        rounded = [np.round(key / max(key.max(), 1e-300), 9) if len(key) else key for key in keys]
        return np.lexsort(rounded)

    def best(self, keep: int, objective: str, distinct: Distinct) -> "Scores":
        """The best of those that fit, best first."""
        fitting = np.flatnonzero(self.fits)
        order = fitting[self.take(fitting).order(objective)]
        if not distinct:
            return self.take(order[:keep])
        if distinct == "size":
            sizes = self.space.world_size[order]
            return self.take(order[np.sort(np.unique(sizes, return_index=True)[1])][:keep])
        keys = np.stack([self.space.columns[name] for name in (*DEGREES, "schedule")], axis=1)
        firsts: dict[tuple[int, ...], int] = {}
        for index in order.tolist():
            firsts.setdefault(tuple(keys[index].tolist()), index)
            if len(firsts) == keep:
                break
        return self.take(np.array(list(firsts.values()), dtype=np.intp))


def score(question: Question, space: Space, memory: Array | None = None) -> Scores:
    """Closed-form costs of layouts, with the slowest rank as the engine's partition makes it. `memory`: bytes of the
    fullest rank of each, where they are known."""
    size = len(space)
    if not size:  # as long to compute as those of a thousand
        none = np.zeros(0)
        return Scores(space, dict.fromkeys(PARTS, none), none, np.zeros(0, dtype=bool), none)
    estimates: Estimates = estimate_many(
        question.model, question.machine, space.jobs, question.profile, question.cost_precision, memory
    )
    parts = {name: of_size(getattr(estimates.time, name), size) for name in PARTS}
    seconds = LayerSeconds.of(question, space.jobs)
    passes = Passes.of(question, seconds, _total)
    assumed = space.jobs.micro_batches * assumed_slowest(question, space, seconds)
    real, idle = _real_stages(question, space, passes, real_slowest(question, space, seconds))
    straggler = _straggling(question, space.jobs) * (real + idle)
    parts |= {"bubble": of_size(idle, size), "straggler": of_size(straggler, size)}
    busy = sum((parts[name] for name in BUSY), np.zeros(size))
    # Part of the host's time comes once per step and does not grow with the layers.
    fixed = np.maximum(busy - assumed, 0.0)
    growth = real / np.maximum(busy - fixed, 1e-300)
    for name in BUSY:
        once = fixed if name == "host" else 0.0
        parts[name] = (parts[name] - once) * growth + once
    if space.layers:  # the cost model knows only its own division
        parts["optimizer"] = parts["optimizer"] * _fuller_stage(question, space)
    others = parts["data"] - folded_sum(question, space) + parts["optimizer"]
    even = _priced(question, space, _least(question, space, passes) + fixed + others)
    fits = estimates.fits & (estimates.memory <= question.limit)
    parts = {name: _priced(question, space, part) for name, part in parts.items()}
    return Scores(space, parts, of_size(estimates.memory, size), np.broadcast_to(fits, size), even)


def _fuller_stage(question: Question, space: Space) -> Array:
    """Parameters of the rank that has most, over those that the cost model counts with."""
    shape, jobs = Shape.of(question.model), space.jobs
    assumed = first_parameters(shape, jobs, partition(shape, jobs, question.profile)).total
    part = held(question.model, space.layout(0), question.sequence)
    most = [rank_parameters(shape, jobs, *each).total for each in zip(part.layers, *part.ends(), strict=True)]
    return np.asarray(reduce(np.maximum, most) / assumed)


def _priced(question: Question, space: Space, seconds: Array) -> Array:
    """Seconds as the question compares them."""
    if question.paces:
        sizes, paces = np.array(question.paces).T
        return np.asarray(seconds / paces[np.searchsorted(sizes, space.jobs.world_size)])
    return seconds * space.jobs.world_size if question.priced else seconds


def _straggling(question: Question, jobs: Jobs) -> Array:
    """Of the seconds of a pipeline those that ranks wait for the slowest of many nodes, as `cost.step` has it."""
    fabric = question.machine.fabric
    return np.asarray(fabric.straggler * np.log2(np.maximum(jobs.world_size / fabric.node, 1.0)))


def _real_stages(question: Question, space: Space, passes: "Passes", slowest: Array) -> tuple[Array, Array]:
    """Seconds of a step in which the slowest rank computes, and in which it waits for others. `slowest`: those of one
    micro-batch; what others take is the rest, and so no partition and no schedule is faster than equal stages."""
    jobs, chip, count = space.jobs, question.machine.chip, space.jobs.micro_batches
    everything = passes.forward + passes.backward
    idle = passes.idle(jobs, np.maximum(everything - slowest, 0.0))
    busy = count * with_shared_cores(chip, slowest, everything / jobs.pp)
    return busy, np.maximum(chip.together * (count * slowest + idle) - busy, 0.0) if chip.together < 1 else idle


def score_all(question: Question, space: Space, memory: Array | None = None) -> Scores:
    """As `score`, in chunks small enough for the processor's caches."""
    if memory is None:
        return concatenated([score(question, part) for part in chunks(space)])
    chunked = np.split(memory, range(CHUNK, len(memory), CHUNK))
    return concatenated([score(question, part, each) for part, each in zip(chunks(space), chunked, strict=True)])


def memory_of(question: Question, space: Space, cost: Memory = peak_memory) -> Array:
    """Bytes of the fullest rank of each, or of another."""
    shape = Shape.of(question.model)
    each = (of_size(cost(shape, part.jobs, question.profile), len(part)) for part in chunks(space))
    return np.concatenate(list(each)) if len(space) else np.zeros(0)


def chunks(space: Space) -> Iterator[Space]:
    """Chunks small enough for the processor's caches."""
    if len(space) <= CHUNK:
        yield space  # with what is known of it
        return
    for start in range(0, len(space), CHUNK):
        columns = {name: column[start : start + CHUNK] for name, column in space.columns.items()}
        yield Space(columns, space.global_batch, space.sequence)


def concatenated(scores: list[Scores]) -> Scores:
    """Those of several spaces as one."""
    if len(scores) == 1:
        return scores[0]
    first = scores[0].space
    columns = {name: np.concatenate([part.space.columns[name] for part in scores]) for name in first.columns}
    return Scores(
        Space(columns, first.global_batch, first.sequence),
        {name: np.concatenate([part.parts[name] for part in scores]) for name in PARTS},
        np.concatenate([part.memory for part in scores]),
        np.concatenate([part.fits for part in scores]),
        np.concatenate([part.even for part in scores]),
    )


# What no layout of a shape undercuts, whatever it recomputes, splits, schedules or hides: what a search need not look
# at any closer.


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch on all ranks together."""

    forward: Array
    backward: Array
    weight: Array
    """What a schedule may put off of the backward pass."""
    paired: Array
    """Most that the pairs of DualPipeV hide of the layers with experts, where 1F1B waits."""

    @classmethod
    def of(cls, question: Question, seconds: LayerSeconds, layer: Callable[[Pass], Array]) -> "Passes":
        """`layer`: the seconds of a layer in one direction."""
        shape, parts, times = Shape.of(question.model), seconds.parts, seconds.times
        leading, routed = shape.dense_layers, shape.layers - shape.dense_layers
        forward, backward = (
            leading * layer(dense) + routed * layer(mixture)
            for dense, mixture in zip(times.dense, times.mixture, strict=True)
        )
        head = head_seconds(shape, parts, times)
        weight = shape.layers * times.put_off(parts.attention_forward) + head.weight
        return cls(
            forward + head.forward + 0.3 * parts.embedding,
            backward + head.backward + 0.7 * parts.embedding,
            weight,
            routed * _paired(question, times),
        )

    @classmethod
    def each_once(cls, question: Question, jobs: Jobs, layer: Callable[[Pass], Array]) -> "Passes":
        """The same, asked once of all layouts whose layers are alike: there are many more layouts."""

        def asked(some: Jobs, _: object = None) -> Passes:
            return cls.of(question, LayerSeconds.of(question, some), layer)

        if mixes(jobs):
            return asked(jobs)
        columns = decides_layers(jobs, question.machine.fabric, question.profile)
        return each_once(Shape.of(question.model), jobs, columns, asked)

    def idle(self, jobs: Jobs, others: Array) -> Array:
        """Seconds a step that the slowest rank waits under each schedule. `others`: what all others compute."""
        # With unequal stages the others are shorter than the mean of all, and so is the waiting for them.
        each, gaps = (self.forward + self.backward) / jobs.pp, np.maximum(jobs.pp - 1, 1)
        shorter = np.minimum(others / np.maximum(gaps * each, 1e-300), 1.0) / jobs.pp
        forward, backward = shorter * self.forward, shorter * self.backward
        return bubble(jobs, forward, backward, np.minimum(shorter * self.weight, backward / 2), others)


def _total(each: Pass) -> Array:
    return each.total


def least_seconds(question: Question, space: Space, context: bool) -> Array:
    """Seconds of a step with equal stages, the schedule that waits least, and nothing else to wait for but what is
    inside layers. `context`: also for the keys of other ranks."""

    def alone(each: Pass) -> Array:
        waits = each.tensor + each.expert + (each.context if context else 0.0)
        return np.maximum(each.compute + waits, each.floor)

    return _priced(question, space, _least(question, space, Passes.each_once(question, space.jobs, alone)))


LIKELY = (
    ("selective", 1, False, 0.0),
    ("selective", 2, True, 0.1),
    ("selective", 3, False, 0.25),
    ("full", 1, False, 1.0),
    ("full", 2, True, 1.1),
    ("full", 3, False, 1.25),
)
"""Recomputation, ZeRO and offloading that a layout needs for its memory, the cheapest first, and forward passes that
this takes."""
UNLIKELY = 3.0
"""Forward passes that stand for what takes still less memory."""


def likely_seconds(question: Question, space: Space) -> Array:
    """The same with the sums of gradients under ZeRO 1, and with what its memory asks for: no bound, but close to what
    is best."""
    shape, jobs, engine = Shape.of(question.model), space.jobs, question.profile
    least = least_seconds(question, space, True)
    layers, times = partition(shape, jobs, engine).first, LayerSeconds.of(question, jobs).times
    held = rank_parameters(shape, jobs, layers, np.ones(()), np.zeros(()))
    forward, backward = (layers * times.mean("total", way) for way in (0, 1))
    split = replace(jobs, zero=number(1))
    sums = reduction(shape, split, question.machine.fabric, engine, held, forward, backward)
    return least + _priced(question, space, sums + _likely_passes(question, space) * jobs.micro_batches * forward)


def _likely_passes(question: Question, space: Space) -> Array:
    """Forward passes that fitting into the memory takes."""
    passes, left = np.full(len(space), UNLIKELY), np.arange(len(space))
    for recompute, zero, offload, more in LIKELY:
        if offload and not question.tries_offload:
            continue
        some = space.take(left)
        some = some.offloaded() if offload else some
        ones = np.ones(len(left), dtype=np.int64)
        columns = {**some.columns, "recompute": RECOMPUTE.index(recompute) * ones, "zero": zero * ones}
        fits = memory_of(question, Space(columns, space.global_batch, space.sequence), first_memory) <= question.limit
        passes[left[fits]] = more
        left = left[~fits]
    return passes


def least_in_layers(question: Question, space: Space) -> Array:
    """The same of layouts whose recomputation is known."""
    return _priced(question, space, _least(question, space, Passes.each_once(question, space.jobs, _total)))


def least_scheduled(question: Question, space: Space) -> Array:
    """… with the waiting of the schedule that each has, which equal stages leave."""
    jobs, passes = space.jobs, Passes.each_once(question, space.jobs, _total)
    stage = (passes.forward + passes.backward) / jobs.pp
    least = jobs.micro_batches * stage
    if question.machine.chip.together == 1:  # as in `_least`
        least = least + passes.idle(jobs, (jobs.pp - 1) * stage)
    least = least * (1 + _straggling(question, jobs))
    least = least + _transfers(question, jobs, waited_transfers(jobs, question.profile))
    return _priced(question, space, of_size(least, len(space)))


def least_with_sums(question: Question, space: Space) -> Array:
    """… with what replicas wait for, where ZeRO is known."""
    shape, jobs, engine, fabric = Shape.of(question.model), space.jobs, question.profile, question.machine.fabric
    seconds, stage = LayerSeconds.of(question, jobs), partition(shape, jobs, engine)
    held = first_parameters(shape, jobs, stage)
    waits = replica_time(shape, jobs, fabric, engine, stage, held, seconds.times, seconds.parts)
    least = _least(question, space, Passes.of(question, seconds, _total))
    return _priced(question, space, least + waits - folded_sum(question, space))


def folded_sum(question: Question, space: Space) -> Array:
    """Of the seconds that replicas wait those that a V-shaped schedule saves, whose first rank holds both ends of the
    model: the gradient of a tied embedding is not summed over the pipeline."""
    shape, engine = Shape.of(question.model), question.profile
    return tied_sum(shape, space.jobs, question.machine.fabric, engine) if engine.own_collectives else np.zeros(())


def _least(question: Question, space: Space, passes: Passes) -> Array:
    """Seconds with equal stages, the schedule with the smallest bubble and the fewest messages to wait for."""
    shape, jobs = Shape.of(question.model), space.jobs
    forward, backward = passes.forward / jobs.pp, passes.backward / jobs.pp
    weight = np.minimum(passes.weight / jobs.pp, backward / 2)
    deepest = replace(jobs, vpp=np.maximum(np.floor(shape.layers / jobs.pp), 1.0))
    others = np.maximum(jobs.pp - 1, 0) * (forward + backward)
    idle = idle_by_schedule(deepest, forward, backward, weight, others)
    pairs = idle.pop(DUAL_PIPE_V)
    busy = jobs.micro_batches * (forward + backward)
    straggling = 1 + _straggling(question, jobs)
    gpipe = question.fixed.get("schedule") == "gpipe"
    moving = _transfers(question, jobs, least_waited_transfers(jobs, question.profile, gpipe))
    if question.machine.chip.together < 1:  # ranks that share cores wait less than their own seconds say
        return of_size(busy * straggling + moving, len(space))
    least = busy + reduce(np.minimum, idle.values())
    dual = replace(jobs, schedule=number(DUAL_PIPE_V))
    relief = np.where(jobs.pp > 1, paired_fraction(dual) * passes.paired, 0.0)
    least = np.minimum(least, busy + pairs - (jobs.micro_batches + jobs.pp) * relief / jobs.pp)
    return of_size(least * straggling + moving, len(space))


def _paired(question: Question, times: LayerTimes) -> Array:
    engine = question.profile
    if not engine.expert_paired or question.model.mixture is None:
        return np.zeros(())
    forward, backward = times.mixture
    hidden = np.minimum(forward.expert, engine.expert_paired * backward.compute)
    return hidden + np.minimum(backward.expert, engine.expert_paired * forward.compute)


def _transfers(question: Question, jobs: Jobs, waited: Array) -> Array:
    """Seconds of a step in which ranks wait for so many messages between stages, there and back."""
    message = hop(Shape.of(question.model), jobs, question.machine.fabric, question.profile)
    return np.asarray(2 * message * (jobs.pp > 1) * waited)


def least_memory(question: Question, space: Space, split: bool = True) -> Array:
    """Bytes of the first pipeline rank with everything recomputed; `split`: and split, whatever ZeRO says."""
    return of_size(Least.of(question, space, split).recomputed, len(space))


def least_fitting(question: Question, space: Space, least: Array) -> tuple[Array, Array]:
    """Bytes of the first pipeline rank of shapes with everything recomputed and split, and the seconds that none of
    their layouts undercuts with as many layers recomputed as its memory asks for. `least`: those with none, by
    `least_seconds`."""
    held = Least.of(question, space, split=True)
    memory, again = of_size(held.recomputed, len(space)), of_size(held.again(question), len(space))
    rows = np.flatnonzero((again > 0) & (memory <= question.limit))
    some = space.take(rows)
    columns = {**some.columns, "recompute": np.full(len(rows), RECOMPUTE.index("full"), dtype=np.int64)}
    heavy = least_seconds(question, Space(columns, space.global_batch, space.sequence), context=False)
    found = least.copy()
    found[rows] += again[rows] * np.maximum(heavy - least[rows], 0.0)
    return memory, found


@dataclass(frozen=True)
class Least:
    """Bytes that the first pipeline rank of a layout holds at least."""

    states: Array
    layers: Array
    """Layers of the rank, times the micro-batches in flight."""
    each: Array
    """Layers of the rank."""
    boundary: Array
    """Bytes that a layer keeps of a micro-batch with everything recomputed."""
    kept: Array
    """… with no matmul recomputed."""

    @property
    def recomputed(self) -> Array:
        """Bytes with everything recomputed."""
        return self.states + self.layers * self.boundary

    def again(self, question: Question) -> Array:
        """Fraction of the layers that must be recomputed in full for all to fit, and a layer less than that: stages
        need not be as long as those of the first rank."""
        engine = question.profile
        missing = engine.reserve * (self.states + engine.fixed + self.layers * self.kept) - question.limit
        freed = engine.reserve * self.layers / self.each * np.maximum(self.kept - self.boundary, 1.0)
        return np.asarray(np.clip((np.ceil(missing / freed) - 1) / self.each, 0.0, 1.0))

    @classmethod
    def of(cls, question: Question, space: Space, split: bool) -> "Least":
        """Those of some layouts. `split`: all is split, whatever ZeRO says."""
        shape, jobs, engine = Shape.of(question.model), space.jobs, question.profile
        layers = partition(shape, jobs, engine).first
        held = rank_parameters(shape, jobs, layers, np.ones(()), np.zeros(()))
        parts = (question.fixed.get("shard", 0) or jobs.dp) * jobs.cp
        owned = held.plain / parts + held.routed / np.maximum(parts * jobs.tp / jobs.ep, 1.0)
        offloads = question.tries_offload or question.fixed_offload
        kinds = (engine.weight_bytes, 3), (engine.gradient_bytes, 2), (0.0 if offloads else engine.optimizer_bytes, 1)
        states = np.asarray(
            sum(each * (owned if split else np.where(jobs.zero >= stage, owned, held.total)) for each, stage in kinds)
        )
        if engine.compiled:
            # Gradients that nobody else has are not kept where there is one micro-batch (`cost.memory.fullest`).
            holders = jobs.dp * jobs.cp * jobs.tp
            unkept = held.plain * (holders <= 1) + held.routed * (holders <= jobs.ep)
            states = states - engine.gradient_bytes * unkept
        kept = [
            each
            for kind in ("none", "selective")
            for each in kept_per_layer(shape, replace(jobs, recompute=number(RECOMPUTE.index(kind))), engine)
        ]
        split_sequence = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        boundary = engine.kept_boundary * jobs.tokens * shape.hidden / split_sequence
        return cls(states, layers * in_flight(jobs, np.zeros(())), layers, boundary, reduce(np.minimum, kept))
