"""Which layers a pipeline rank holds, how long a schedule takes in closed form, how many micro-batches it keeps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.compute import attention_parameters, feed_forward_parameters, table_parameters
from cuboid.cost.constants import Chip, Engine
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.reuse import recent
from cuboid.spec.layout import SCHEDULES

GPIPE, PLAIN, INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V, DUAL_PIPE_V = range(len(SCHEDULES))


@dataclass(frozen=True)
class Partition:
    """Layers on the first pipeline rank, on the fullest one between, and on the one with the head."""

    first: Array
    middle: Array
    last: Array
    filled: Array
    """How many ranks get anything at all."""


def _even(layers: Array, ranks: Array) -> Partition:
    """What does not divide goes to the ranks between, which hold neither embedding nor head, then to the first."""
    each = np.floor(layers / ranks)
    left = layers - each * ranks
    first = each + ((left > 0) & (left > ranks - 2))
    middle = np.where(ranks > 2, each + (left > 0), first)
    return Partition(first, middle, each, np.minimum(layers, ranks))


def _head(layers: Array, ranks: Array) -> Partition:
    """Embedding and head count as one layer each."""
    each = np.ceil((layers + 2) / ranks)
    alone = ranks == 1
    middle = np.where(alone, layers, each)
    ends = np.where(alone, layers, each - 1)
    return Partition(ends, middle, ends, np.minimum(layers + 2, ranks))


def _balanced(shape: Shape, ranks: Array) -> Partition:
    """A rank takes blocks until the costs so far pass its part, with the block that passes it (nanotron).

    The blocks are the embedding, the layers, and behind them norm, head, cast and loss, of which only the head counts.
    """
    layer = attention_parameters(shape) + feed_forward_parameters(shape, shape.ffn)
    head = table_parameters(shape) / np.maximum(layer, 1)
    total, ranks, layers = np.broadcast_arrays(shape.layers + head, ranks, shape.layers)
    rank, cost, held = np.zeros(total.shape), np.zeros(total.shape), np.zeros(total.shape)
    first, middle, last = np.zeros(total.shape), np.zeros(total.shape), np.zeros(total.shape)
    deepest = int(np.max(layers, initial=0))
    for block in range(1, deepest + 5):
        is_layer = block <= layers
        is_head = block == layers + 2
        inside = block <= layers + 4
        cost = cost + is_layer + np.where(is_head, head, 0.0)
        held = held + is_layer
        last = np.where(is_head, held, last)
        passes = inside & (cost >= total * (rank + 1) / ranks * (1 - 1e-9)) & (rank < ranks - 1)
        first = np.where((rank == 0) & is_layer, held, first)
        middle = np.where((rank > 0) & is_layer, np.maximum(middle, held), middle)
        # The loss, the last block, fills its rank whether or not it passes its part.
        passes = passes & (block < layers + 4)
        rank, held = rank + passes, np.where(passes, 0.0, held)
    return Partition(first, np.where(middle > 0, middle, first), last, np.where(ranks > 1, rank + 1, ranks))


@recent
def partition(shape: Shape, jobs: Jobs, engine: Engine) -> Partition:
    """How many layers the pipeline ranks hold under the engine's habit."""
    if engine.partition == "balanced":
        return _balanced(shape, jobs.pp)
    if engine.partition == "head":
        return _head(shape.layers, jobs.pp)
    return _even(shape.layers, jobs.pp)


def with_shared_cores(chip: Chip, slowest: Array, mean: Array) -> Array:
    """Seconds of the slowest rank; where ranks share cores, it has more of them while the others wait for it."""
    return np.maximum(mean, chip.together * slowest) if chip.together < 1 else slowest


def is_v_shaped(jobs: Jobs) -> Array:
    """1 where the first rank also holds the last stage: one rank only, or a V-shaped schedule."""
    vee = (jobs.schedule == ZERO_BUBBLE_V) | (jobs.schedule == DUAL_PIPE_V)
    return np.asarray((jobs.pp == 1) | vee, dtype=np.float64)


def splits_backward(jobs: Jobs) -> NDArray[np.bool_]:
    """Whether the schedule puts weight gradients off."""
    return np.asarray(jobs.schedule >= ZERO_BUBBLE)


def paired_fraction(jobs: Jobs) -> Array:
    """Of all passes those that DualPipeV runs as pairs, as counted in its tables: all but filling and draining."""
    paired = np.maximum(1 - 1.23 * jobs.pp / jobs.micro_batches, 0.0)
    return np.where((jobs.schedule == DUAL_PIPE_V) & (jobs.pp > 1), paired, 0.0)


def waited_transfers(jobs: Jobs, engine: Engine) -> Array:
    """How many times a step waits for a message there and back, as simulating the tables with a short transfer gives.

    In the steady state only 1F1B waits: it has no more micro-batches in flight than ranks compute on, so that each of
    them waits at all ranks but one of its round. Filling and draining the pipeline always does, twice where it is
    filled with halves of a pass, and as often as there are chunks."""
    gaps = jobs.pp - 1
    if not engine.transfer_scheduled:
        return np.asarray(jobs.micro_batches * jobs.vpp * engine.transfer_exposed + gaps)
    steady = np.where(jobs.schedule == PLAIN, gaps / jobs.pp, 0.0)
    fill = np.where(jobs.schedule == INTERLEAVED, jobs.vpp * gaps + 1, 2 * gaps)
    fill = np.where(jobs.schedule == GPIPE, gaps, np.where(jobs.schedule == PLAIN, gaps - 1, fill))
    return np.asarray(jobs.micro_batches * jobs.vpp * engine.transfer_exposed * steady + np.maximum(fill, 0.0))


def least_waited_transfers(jobs: Jobs, engine: Engine, gpipe: bool = False) -> Array:
    """The same under whichever schedule waits least. `gpipe`: it may be GPipe too."""
    gaps = jobs.pp - 1
    if not engine.transfer_scheduled:
        return np.asarray(jobs.micro_batches * engine.transfer_exposed + gaps)
    steady = jobs.micro_batches * engine.transfer_exposed * gaps / jobs.pp
    least = np.minimum(steady + np.maximum(gaps - 1, 0.0), 2 * gaps)
    return np.minimum(least, gaps) if gpipe else np.asarray(least)


def in_flight(jobs: Jobs, rank: Array) -> Array:
    """Most micro-batches whose activations a pipeline rank keeps at once, in units of all of its layers."""
    micro_batches, ranks, chunks = jobs.micro_batches, jobs.pp, jobs.vpp
    plain = ranks - rank
    interleaved = (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks
    # Where weight gradients wait, what they need waits with them: all ranks keep as much as the first.
    waits = (jobs.schedule == ZERO_BUBBLE) | (jobs.schedule == ZERO_BUBBLE_V)
    by_schedule = np.where(jobs.schedule == DUAL_PIPE_V, np.where(ranks > 1, ranks + 0.5, 1.0), plain)
    by_schedule = np.where(waits, ranks, by_schedule)
    by_schedule = np.where(jobs.schedule == INTERLEAVED, np.where(ranks > 1, interleaved, 1.0), by_schedule)
    by_schedule = np.where(jobs.schedule == GPIPE, micro_batches, by_schedule)
    return np.asarray(np.minimum(by_schedule * jobs.held, micro_batches))


def idle_by_schedule(jobs: Jobs, forward: Array, backward: Array, weight: Array, others: Array) -> dict[int, Array]:
    """Schedule -> seconds the slowest rank waits for others in one step: with equal stages what simulating its table
    gives. Arguments as those of `bubble`."""
    gaps = np.maximum(jobs.pp - 1, 0)
    inputs = backward - weight
    uneven = np.maximum(others - gaps * (forward + backward), 0.0)
    # With fewer micro-batches than ranks there is less to fill the waiting with.
    short = np.maximum(jobs.pp - jobs.micro_batches, 0.0)
    interleaved = others / jobs.vpp + short * (forward + backward) * (1 - 1 / jobs.vpp)
    zero_bubble = gaps * np.maximum(forward + inputs - weight, 0.0) + short * weight + uneven
    # The V-shaped tables fill up with twice as many micro-batches as ranks.
    few = np.clip(2 - jobs.micro_batches / jobs.pp, 0.0, 1.0)
    vee_full = np.maximum(inputs / 2, inputs - weight)
    vee = gaps * (vee_full + few * np.maximum(inputs - vee_full, 0.0)) + short * forward + uneven
    dual_full = np.maximum(inputs - weight / 2, 0.0)
    dual = gaps * (dual_full + few * (inputs + weight / 2 - dual_full)) + short * forward + uneven
    return {PLAIN: others, INTERLEAVED: interleaved, ZERO_BUBBLE: zero_bubble, ZERO_BUBBLE_V: vee, DUAL_PIPE_V: dual}


def bubble(jobs: Jobs, forward: Array, backward: Array, weight: Array, others: Array) -> Array:
    """Seconds the slowest rank waits for others in one step.

    `forward`, `backward` and `weight` (the weight-gradient part of backward) are means over the ranks for one
    micro-batch; `others` is the sum of forward and backward over all ranks but the slowest.
    """
    found = idle_by_schedule(jobs, forward, backward, weight, others)
    idle = others
    for schedule, seconds in found.items():
        idle = np.where(jobs.schedule == schedule, seconds, idle)
    return idle
