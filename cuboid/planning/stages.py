"""What each pipeline rank holds under the engine's own partition, and how long its layers take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuboid.cost.compute import Kernels, kernels
from cuboid.cost.constants import Engine, engine_for
from cuboid.cost.estimate import Machine
from cuboid.cost.inputs import Array, Jobs, Shape, heavier, lighter, mixes, single
from cuboid.cost.layers import FOR_WEIGHTS, LayerTimes, Pass, head_seconds, hop, layer_times
from cuboid.cost.pipeline import is_v_shaped, with_shared_cores
from cuboid.cost.pipeline import partition as assumed_partition
from cuboid.planning.question import Question
from cuboid.planning.space import Space
from cuboid.schedule.simulate import StageCosts
from cuboid.spec.layout import SCHEDULES, V_SHAPED, Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.partition import partition


@dataclass(frozen=True)
class Held:
    """Layers of every stage, and which rank it is on."""

    dense: tuple[int, ...]
    """Layers without experts, per stage."""
    mixture: tuple[int, ...]
    """Layers with experts, per stage."""
    rank: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(dense + mixture for dense, mixture in zip(self.dense, self.mixture, strict=True))

    def by_rank(self, per_stage: Sequence[float]) -> Array:
        """Sums over the stages of each rank."""
        return np.asarray(np.bincount(self.rank, weights=per_stage), dtype=np.float64)

    @property
    def layers(self) -> Array:
        """Layers per rank."""
        return self.by_rank(self.counts)

    def ends(self) -> tuple[Array, Array]:
        """Per rank 1 where it holds the embedding, and 1 where it holds the head."""
        none = [0.0] * (len(self.rank) - 1)
        return self.by_rank([1.0, *none]), self.by_rank([*none, 1.0])

    def recomputed(self, most: int) -> Array:
        """Layers per rank that are recomputed more than the others: at most so many of each stage."""
        return self.by_rank([min(most or count, count) for count in self.counts])

    def different_ranks(self, again: int = 0) -> tuple[Array, Array]:
        """Layers without and with experts, embedding and head of each rank in columns, ranks that are alike once; and
        so the layers without and with experts that come after the first `again` of each stage (0: none does)."""
        return _different_ranks(self, again)


@lru_cache(maxsize=1024)
def _different_ranks(part: Held, again: int) -> tuple[Array, Array]:
    rows = [[0, 0, 0, 0, 0, 0] for _ in range(max(part.rank) + 1)]
    for rank, dense, mixture in zip(part.rank, part.dense, part.mixture, strict=True):
        first = min(again or dense, dense)
        others = min(again - first if again else mixture, mixture)
        for place, count in ((0, first), (1, others), (4, dense - first), (5, mixture - others)):
            rows[rank][place] += count
    rows[part.rank[0]][2] = rows[part.rank[-1]][3] = 1
    table = np.array(sorted(set(map(tuple, rows))), dtype=np.float64).T
    return np.ascontiguousarray(table[:4].T).T, table[4:]


def held(model: ModelSpec, layout: Layout, sequence: int) -> Held:
    """The partition of a model over a pipeline."""
    return _held(model, layout.schedule, layout.pp, layout.vpp, sequence, layout.layers)


@lru_cache(maxsize=1024)
def _held(model: ModelSpec, schedule: str, pp: int, vpp: int, sequence: int, layers: tuple[int, ...]) -> Held:
    stages = pp * vpp
    leading = model.layers if model.mixture is None else model.mixture.first_dense_layers
    parts = partition(model, stages, sequence, layers)
    dense = tuple(max(min(part.stop, leading) - part.start, 0) for part in parts)
    mixture = tuple(len(part) - count for part, count in zip(parts, dense, strict=True))
    vee = schedule in V_SHAPED
    rank = tuple(min(stage, 2 * pp - 1 - stage) if vee else stage % pp for stage in range(stages))
    return Held(dense, mixture, rank)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch, one entry per layout: a layer of each kind, the embedding and the head."""

    shape: Shape
    parts: Kernels
    times: LayerTimes
    """On average over the layers."""
    more: LayerTimes
    """Of layers that are recomputed as the layout says."""
    less: LayerTimes
    """Of those that are recomputed one kind less; the same where a layout has none."""

    @classmethod
    def of(cls, question: Question, jobs: Jobs) -> "LayerSeconds":
        """Those of some layouts."""
        shape, engine, machine = Shape.of(question.model), question.profile, question.machine
        parts = kernels(shape, jobs, machine.chip, engine, question.cost_precision)
        kinds = (jobs, heavier(jobs), lighter(jobs)) if mixes(jobs) else (jobs,)
        times = [layer_times(shape, each, machine.fabric, engine, parts, question.cost_precision) for each in kinds]
        return cls(shape, parts, times[0], times[len(times) // 2], times[-1])

    @property
    def dense(self) -> Array:
        """A layer without experts, forward and backward."""
        return _both(self.times.dense)

    @property
    def mixture(self) -> Array:
        """A layer with experts, forward and backward."""
        return _both(self.times.mixture)

    @property
    def head(self) -> Array:
        """The head and the loss, forward and backward."""
        return head_seconds(self.shape, self.parts, self.more).both


def _both(passes: tuple[Pass, Pass]) -> Array:
    return passes[0].total + passes[1].total


def assumed_slowest(question: Question, space: Space, seconds: LayerSeconds) -> Array:
    """Seconds of one micro-batch on the slowest rank as the cost model splits the layers."""
    shape = Shape.of(question.model)
    stage = assumed_partition(shape, space.jobs, question.profile)
    layer = seconds.times.mean("total", 0) + seconds.times.mean("total", 1)
    folded = is_v_shaped(space.jobs)
    first = stage.first * layer + seconds.parts.embedding + folded * seconds.head
    ends = np.maximum(first, stage.last * layer + (1 - folded) * seconds.head)
    alone = shape.layers * layer + seconds.parts.embedding + seconds.head
    slowest = np.where(stage.first >= shape.layers, alone, np.maximum(ends, stage.middle * layer))
    return with_shared_cores(question.machine.chip, slowest, alone / space.jobs.pp)


def real_slowest(question: Question, space: Space, seconds: LayerSeconds) -> Array:
    """Seconds of one micro-batch on the slowest rank as the engine splits the layers."""
    columns = space.columns
    more = (_both(seconds.more.dense), _both(seconds.more.mixture), seconds.parts.embedding, seconds.head)
    less = (_both(seconds.less.dense), _both(seconds.less.mixture))
    slowest = np.zeros(len(space))
    kinds = (columns["pp"] * 1_000 + columns["vpp"]) * len(SCHEDULES) + columns["schedule"]
    kinds = kinds * 10_000 + columns["recompute_layers"]
    order = np.argsort(kinds, kind="stable")
    # Sorting groups the layouts; numpy's unique() would, too, and import a hundred milliseconds of masked arrays.
    ordered = kinds[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    seconds_of, less_of = (np.stack(np.broadcast_arrays(*each, slowest)[:-1], axis=1) for each in (more, less))
    for kind, where in zip(ordered[starts].tolist(), np.split(order, starts)[1:], strict=True):
        kind, again = divmod(kind, 10_000)
        stages, schedule = divmod(kind, len(SCHEDULES))
        part = _held(question.model, SCHEDULES[schedule], *divmod(stages, 1_000), question.sequence, space.layers)
        ranks, others = part.different_ranks(again)
        each = seconds_of[where] @ ranks
        slowest[where] = (each + less_of[where] @ others if again else each).max(axis=1)
    return slowest


# What every stage of one layout costs, for the simulator: the detailed path beside the closed forms of `pipeline`.


def even_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; what does not divide goes to the stages between, then to the first."""
    each, left = divmod(layers, stages)
    order = [*range(1, stages - 1), 0, stages - 1]
    longer = set(order[:left]) if stages > 1 else set()
    return [each + (stage in longer) for stage in range(stages)]


def stage_costs(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    *,
    global_batch: int,
    sequence: int,
    engine: Engine | str = "cuboid",
    precision: str = "bf16",
    layers: Sequence[int] | None = None,
) -> tuple[StageCosts, float]:
    """Seconds of one micro-batch on every stage, and of a transfer; `layers` says how many each stage holds."""
    profile = engine_for(engine, machine.chip).in_precision(precision)
    shape, jobs = Shape.of(model), Jobs.of([layout], global_batch=global_batch, sequence=sequence)
    parts = kernels(shape, jobs, machine.chip, profile, precision)
    more = less = layer_times(shape, heavier(jobs), machine.fabric, profile, parts, precision)
    if layout.recompute_layers:
        less = layer_times(shape, lighter(jobs), machine.fabric, profile, parts, precision)
    attention = single(parts.attention_forward)
    # Forward, backward and weight gradients of a layer that is recomputed more or less, without and with experts.
    of_each = [
        (single(ahead.total), single(back.total), single(ahead.compute) - attention + FOR_WEIGHTS * single(back.host))
        for ahead, back in (more.dense, more.mixture, less.dense, less.mixture)
    ]
    counts = list(layers) if layers is not None else even_layers(model.layers, layout.stages)
    dense_layers = model.mixture.first_dense_layers if model.mixture else model.layers

    forward, inputs, weights = [], [], []
    start = 0
    for stage, count in enumerate(counts):
        dense = max(min(dense_layers - start, count), 0)
        again = min(layout.recompute_layers or count, count)
        dense_again = min(dense, again)
        again_routed, dense_left = again - dense_again, dense - dense_again
        kinds = (dense_again, again_routed, dense_left, count - dense - again_routed)
        ahead, back, weight = (
            sum(number * seconds[way] for number, seconds in zip(kinds, of_each, strict=True)) for way in range(3)
        )
        if stage == 0:
            ahead, back = ahead + 0.3 * single(parts.embedding), back + 0.7 * single(parts.embedding)
        if stage == len(counts) - 1:
            head = head_seconds(shape, parts, more)
            ahead, back = ahead + single(head.forward), back + single(head.backward)
            weight += single(head.weight)
        weight = min(weight, back / 2)
        forward.append(ahead)
        inputs.append(back - weight)
        weights.append(weight)
        start += count
    message = hop(shape, jobs, machine.fabric, profile)
    costs = StageCosts(forward=tuple(forward), input_backward=tuple(inputs), weight_backward=tuple(weights))
    return costs, single(message) if layout.pp > 1 else 0.0
