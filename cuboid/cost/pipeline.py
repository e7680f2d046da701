"""Which layers a pipeline rank holds, how long a schedule takes in closed form, how many micro-batches are in flight."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.constants import Engine
from cuboid.cost.flops import head_parameters, layer_parameters
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.spec.layout import SCHEDULES

GPIPE, PLAIN, INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V, DUAL_PIPE_V = range(len(SCHEDULES))


@dataclass(frozen=True)
class Partition:
    """Layers on the first pipeline rank, on the fullest one between, and on the last; with one rank all are equal."""

    first: Array
    middle: Array
    last: Array


def _even(layers: Array, ranks: Array) -> Partition:
    """What does not divide goes to the ranks between, which hold neither embedding nor head, then to the first."""
    each = np.floor(layers / ranks)
    left = layers - each * ranks
    first = each + ((left > 0) & (left > ranks - 2))
    middle = np.where(ranks > 2, each + (left > 0), first)
    return Partition(first, middle, each)


def _head(layers: Array, ranks: Array) -> Partition:
    """Embedding and head count as one layer each."""
    each = np.ceil((layers + 2) / ranks)
    alone = ranks == 1
    middle = np.where(alone, layers, each)
    return Partition(np.where(alone, layers, each - 1), middle, np.where(alone, layers, each - 1))


def _balanced(shape: Shape, ranks: Array) -> Partition:
    """A rank takes blocks until the costs so far pass its share, and the block that passes it too (nanotron)."""
    head = head_parameters(shape) / np.maximum(layer_parameters(shape).dense - 2 * shape.hidden, 1)
    total = shape.layers + head
    first = np.minimum(np.ceil(total / ranks), shape.layers)
    through = np.minimum(np.ceil(total * (ranks - 1) / ranks), shape.layers)
    middle = np.where(ranks > 2, np.ceil(total / ranks), first)
    alone = ranks == 1
    return Partition(
        np.where(alone, shape.layers, first),
        np.where(alone, shape.layers, np.minimum(middle, first)),
        np.where(alone, shape.layers, np.maximum(shape.layers - through, 0)),
    )


def partition(shape: Shape, jobs: Jobs, engine: Engine) -> Partition:
    """How many layers the pipeline ranks hold under the engine's habit."""
    if engine.partition == "balanced":
        return _balanced(shape, jobs.pp)
    if engine.partition == "head":
        return _head(shape.layers, jobs.pp)
    return _even(shape.layers, jobs.pp)


def in_flight(jobs: Jobs, rank: Array) -> Array:
    """Most micro-batches whose activations a pipeline rank keeps at once, in units of all of its layers."""
    micro_batches, ranks, chunks = jobs.micro_batches, jobs.pp, jobs.vpp
    plain = ranks - rank
    interleaved = (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks
    by_schedule = np.select(
        [
            jobs.schedule == GPIPE,
            jobs.schedule == INTERLEAVED,
            jobs.schedule == ZERO_BUBBLE_V,
            jobs.schedule == DUAL_PIPE_V,
        ],
        [micro_batches, np.where(ranks > 1, interleaved, 1.0), ranks, np.where(ranks > 1, ranks + 0.5, 1.0)],
        plain,
    )
    return np.minimum(by_schedule, micro_batches)


def bubble(jobs: Jobs, forward: Array, backward: Array, weight: Array, others: Array) -> Array:
    """Seconds the slowest rank waits for others in one step.

    `forward`, `backward` and `weight` (the weight-gradient part of backward) are means over the ranks for one
    micro-batch; `others` is the sum of forward and backward over all ranks but the slowest.
    """
    gaps = np.maximum(jobs.pp - 1, 0)
    halves = backward - weight
    remainder = jobs.micro_batches % np.maximum(jobs.pp, 1)
    ragged = np.where((jobs.pp > 1) & (remainder > 0), (jobs.pp - remainder) * (forward + backward), 0.0)
    interleaved = others / jobs.vpp + ragged * (jobs.vpp - 1) / jobs.vpp
    uneven = np.maximum(others - gaps * (forward + backward), 0.0)
    zero_bubble = gaps * np.maximum(forward + halves - weight, 0.0) + uneven
    vee = gaps * np.maximum(forward + halves - 2 * weight, 0.0) / 2 + uneven
    dual = gaps * np.maximum(forward + backward - 3 * weight, 0.0) / 2 + gaps * 0.25 * weight + uneven
    return np.select(
        [
            jobs.schedule == INTERLEAVED,
            jobs.schedule == ZERO_BUBBLE,
            jobs.schedule == ZERO_BUBBLE_V,
            jobs.schedule == DUAL_PIPE_V,
        ],
        [interleaved, zero_bubble, vee, dual],
        others,
    )
