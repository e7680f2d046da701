"""What each pipeline rank holds under the engine's own partition, and how long its layers take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from cuboid.cost.compute import Kernels, kernels
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.layers import LayerTimes, layer_times
from cuboid.cost.pipeline import partition as assumed_partition
from cuboid.cost.pipeline import turns_back, with_shared_cores
from cuboid.plan.question import Question
from cuboid.plan.space import Space
from cuboid.spec.layout import SCHEDULES, V_SHAPED
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

    @cached_property
    def different_ranks(self) -> Array:
        """Layers without and with experts, embedding and head of each rank in columns, ranks that are alike once."""
        rows = [[0, 0, 0, 0] for _ in range(max(self.rank) + 1)]
        for rank, dense, mixture in zip(self.rank, self.dense, self.mixture, strict=True):
            rows[rank][0] += dense
            rows[rank][1] += mixture
        rows[self.rank[0]][2] = rows[self.rank[-1]][3] = 1
        return np.array(sorted(set(map(tuple, rows))), dtype=np.float64).T


@lru_cache(maxsize=1024)
def held(model: ModelSpec, schedule: str, pp: int, vpp: int, sequence: int) -> Held:
    """The partition of a model over a pipeline."""
    stages = pp * vpp
    leading = model.layers if model.mixture is None else model.mixture.first_dense_layers
    parts = partition(model, stages, sequence)
    dense = tuple(max(min(part.stop, leading) - part.start, 0) for part in parts)
    mixture = tuple(len(part) - count for part, count in zip(parts, dense, strict=True))
    vee = schedule in V_SHAPED
    rank = tuple(min(stage, 2 * pp - 1 - stage) if vee else stage % pp for stage in range(stages))
    return Held(dense, mixture, rank)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch, one entry per layout: a layer of each kind, the embedding and the head."""

    parts: Kernels
    times: LayerTimes

    @classmethod
    def of(cls, question: Question, jobs: Jobs) -> "LayerSeconds":
        """Those of some layouts."""
        shape, engine, machine = Shape.of(question.model), question.profile, question.machine
        parts = kernels(shape, jobs, machine.chip, engine, question.cost_precision)
        return cls(parts, layer_times(shape, jobs, machine.fabric, engine, parts, question.cost_precision))

    @property
    def dense(self) -> Array:
        """A layer without experts, forward and backward."""
        forward, backward = self.times.dense
        return forward.total + backward.total

    @property
    def mixture(self) -> Array:
        """A layer with experts, forward and backward."""
        forward, backward = self.times.mixture
        return forward.total + backward.total

    @property
    def head(self) -> Array:
        """The head and the loss, forward and backward."""
        return self.parts.head_forward + self.parts.head_backward


def assumed_slowest(question: Question, space: Space, seconds: LayerSeconds) -> Array:
    """Seconds of one micro-batch on the slowest rank as the cost model splits the layers."""
    shape = Shape.of(question.model)
    stage = assumed_partition(shape, space.jobs, question.profile)
    layer = seconds.times.mean("total", 0) + seconds.times.mean("total", 1)
    folded = turns_back(space.jobs)
    first = stage.first * layer + seconds.parts.embedding + folded * seconds.head
    ends = np.maximum(first, stage.last * layer + (1 - folded) * seconds.head)
    alone = shape.layers * layer + seconds.parts.embedding + seconds.head
    slowest = np.where(stage.first >= shape.layers, alone, np.maximum(ends, stage.middle * layer))
    return with_shared_cores(question.machine.chip, slowest, alone / space.jobs.pp)


def everything(question: Question, seconds: LayerSeconds) -> Array:
    """Seconds of one micro-batch on all ranks together."""
    shape = Shape.of(question.model)
    body = shape.dense_layers * seconds.dense + (shape.layers - shape.dense_layers) * seconds.mixture
    return body + seconds.parts.embedding + seconds.head


def real_slowest(question: Question, space: Space, seconds: LayerSeconds) -> Array:
    """Seconds of one micro-batch on the slowest rank as the engine splits the layers."""
    columns = space.columns
    dense, mixture, head, embedding = np.broadcast_arrays(
        seconds.dense, seconds.mixture, seconds.head, seconds.parts.embedding
    )
    slowest = np.zeros(len(space))
    kinds = (columns["pp"] * 1_000 + columns["vpp"]) * len(SCHEDULES) + columns["schedule"]
    order = np.argsort(kinds, kind="stable")
    # Sorting groups the layouts; numpy's unique() would, too, and import a hundred milliseconds of masked arrays.
    ordered = kinds[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    seconds_of = np.stack([dense, mixture, embedding, head], axis=1)
    for kind, where in zip(ordered[starts].tolist(), np.split(order, starts)[1:], strict=True):
        stages, schedule = divmod(kind, len(SCHEDULES))
        part = held(question.model, SCHEDULES[schedule], *divmod(stages, 1_000), question.sequence)
        slowest[where] = (seconds_of[where] @ part.different_ranks).max(axis=1)
    return with_shared_cores(question.machine.chip, slowest, everything(question, seconds) / space.jobs.pp)
