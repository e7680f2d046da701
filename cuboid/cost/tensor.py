"""What tensor-parallel ranks wait for in a layer."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.communication import ONE, all_gather, all_reduce, group, reduce_scatter
from cuboid.cost.compute import Kernels
from cuboid.cost.constants import Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.pipeline import splits_backward


@dataclass(frozen=True)
class TensorWaits:
    """Seconds of a layer forward and backward, the latter with what recomputation repeats."""

    dense: tuple[Array, Array]
    mixture: tuple[Array, Array]


@dataclass(frozen=True)
class _Border:
    """Seconds of the collectives where a region of split matrices begins or ends."""

    forward: Array
    backward: Array


def tensor_waits(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs, parts: Kernels) -> TensorWaits:
    """Two sums forward and two backward in every layer, or as much gathering and scattering."""
    members = group(fabric, jobs.tp, ONE)
    lost = 2 * fabric.spill * (members.nodes - 1) ** 0.7

    def summed(width: Array) -> Array:
        size = engine.activation_wire * jobs.tokens * width
        reduced = all_reduce(fabric, size, members)
        if "reduce_scatter" in fabric.curve:  # measured apart: a sum need not take as long as its two halves
            halves = all_gather(fabric, size, members) + reduce_scatter(fabric, size, members)
            reduced = np.where(jobs.sequence_parallel > 0, halves, reduced)
        return reduced * (1 - engine.tensor_overlap) + lost

    whole = summed(shape.hidden)
    if not engine.own_exchanges:
        layer = 2 * whole, 2 * whole * (1.0 + (jobs.recompute == 2))
        return TensorWaits(layer, layer)
    down = shape.kv_rank + shape.rope_dim
    latent = np.where(shape.q_rank > 0, summed(shape.q_rank + down), whole + summed(down))
    entered = np.where(shape.latent > 0, latent, whole)
    hides = engine.tensor_under_weights * ~splits_backward(jobs)
    under = (hides * parts.attention_columns, hides * parts.feed_columns, hides * parts.shared_columns)
    return _own(jobs, shape, whole, entered, under)


def _own(jobs: Jobs, shape: Shape, whole: Array, entered: Array, under: tuple[Array, Array, Array]) -> TensorWaits:
    """As `plan.layer_collectives` says of this engine: recomputation, selective too, runs a layer again up to its last
    matmul, and tensor ranks route their parts of the tokens to whole experts. `under`: how much of the sums of input
    gradients is hidden, in attention, feed-forward and shared experts."""
    split = jobs.sequence_parallel
    again = (jobs.recompute > 0).astype(np.float64)
    attention_enter = _border(split, 0.5 * entered, 0.5 * entered, 0.0 * entered, entered)
    enter = _border(split, 0.5 * whole, 0.5 * whole, 0.0 * whole, whole)
    leave = _border(split, 0.5 * whole, 0.5 * whole, whole, 0.0 * whole)
    together = _border(split, 0.0 * whole, 0.0 * whole, 0.5 * whole, 0.5 * whole)
    attention = attention_enter.forward + leave.forward
    attention_back = np.maximum(attention_enter.backward - under[0], 0.0) + leave.backward + again * attention
    feed_forward = enter.forward + leave.forward
    feed_back, shared_back = (np.maximum(enter.backward - hidden, 0.0) + leave.backward for hidden in under[1:])
    shared = (shape.shared_ffn > 0).astype(np.float64)
    return TensorWaits(
        dense=(attention + feed_forward, attention_back + feed_back + again * enter.forward),
        mixture=(
            attention + shared * feed_forward + together.forward,
            attention_back + shared * (shared_back + again * feed_forward) + together.backward,
        ),
    )


def _border(split: Array, forward: Array, backward: Array, whole_forward: Array, whole_backward: Array) -> _Border:
    """Where sequences are split, and where they are whole."""
    return _Border(np.where(split > 0, forward, whole_forward), np.where(split > 0, backward, whole_backward))
