"""What a rank of this program holds on a GPU, where blocks are compiled: counted from what the code keeps, tensor by
tensor, at each moment of a step that can be the fullest."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.constants import Engine
from cuboid.cost.flops import layer_parameters, table_parameters
from cuboid.cost.inputs import Array, Jobs, Kept, Shape
from cuboid.cost.layers import gathered_bytes
from cuboid.cost.sharding import RankParameters

LIBRARIES = 75e6
"""Bytes of workspaces that libraries of matmuls take for themselves."""
WIDE = 4.0
"""Bytes of a gradient that is summed."""


def compiled_kept(shape: Shape, jobs: Jobs, engine: Engine) -> tuple[Array, Array]:
    """Bytes one micro-batch keeps in a layer for its backward, without and with experts.

    Of every layer: its input and the sum after attention; queries, keys, values, what attention gave and the sums of
    its exponentials. With nothing recomputed also the inputs of matmuls, which tensor ranks gather whole; selective
    recomputation makes, and gathers, these again. In fp8 they are kept in fp8."""
    element = engine.activation_wire
    split = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    inputs = np.where(jobs.recompute == 1, 0.0, 1.0 if engine.narrow else element)
    plain = (2 * shape.heads + 2 * np.maximum(shape.kv_heads, jobs.tp)) * shape.head_dim
    latent = shape.heads * (2 * (shape.nope_dim + shape.rope_dim) + 2 * shape.v_dim)
    seen = shape.heads * np.where(shape.latent > 0, shape.v_dim, shape.head_dim)
    each = shape.hidden * (2 * element / split + 2 * inputs) + 8 / split
    each = each + (element * np.where(shape.latent > 0, latent, plain) + 4 * shape.heads) / jobs.tp
    normed = (
        shape.heads + np.maximum(shape.kv_heads, jobs.tp)
    ) * shape.head_dim  # before their norm, where there is one
    each = each + shape.qk_norm * element * normed / jobs.tp
    each = each + (inputs * seen / jobs.tp if engine.narrow else 0.0)
    each = each + np.where(shape.latent > 0, element * (2 * shape.q_rank + 2 * shape.kv_rank + shape.rope_dim), 0.0)
    inner = (element * (1 + shape.gated) + inputs) / jobs.tp
    routed = shape.top_k / jobs.tp * (inner * jobs.tp * shape.expert_ffn + engine.kept_routed * shape.hidden)
    dense = jobs.tokens * (each + inner * shape.ffn)
    mixture = jobs.tokens * (each + inner * shape.shared_ffn + routed)
    return dense, np.where(shape.experts > 0, mixture, dense)


@dataclass(frozen=True)
class Fullest:
    """The fullest moment of a step, beside what is always there."""

    gradients: Array
    """As the backward pass computed them, not yet summed."""
    activations: Array
    logits: Array
    transient: Array


def fullest(
    shape: Shape,
    jobs: Jobs,
    engine: Engine,
    held: RankParameters,
    kept: Kept,
    activations: Array,
    first: Array,
    last: Array,
) -> tuple[Array, Fullest]:
    """Whether gradients stay as the backward pass leaves them (one micro-batch, nobody to add), and the moment."""
    element = engine.activation_wire
    each = layer_parameters(shape, jobs.tp)
    of_layer = np.where(shape.experts > 0, each.mixture + each.routed / np.maximum(jobs.ep, 1), 0.0)
    of_layer = np.maximum(of_layer, each.dense)
    table = table_parameters(shape, jobs.tp)
    states = jobs.tokens * shape.hidden * element
    gradient = element  # bytes of one that autograd made
    alone = (jobs.dp * jobs.cp * jobs.tp == 1) & (jobs.micro_batches == 1) & ((shape.tied == 0) | (jobs.pp == 1))
    sharded, gathered = (jobs.zero >= 2) & ~alone, jobs.zero == 3
    flat = np.where(sharded, WIDE * (1 + 1 / (jobs.shard * jobs.cp)), 0.0)  # per parameter of a unit being reduced
    weights = np.where(gathered, element, 0.0)  # per parameter of a unit in use, and of the next one
    own = last * (states / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0) + states)  # what the head itself keeps
    logit = last * element * jobs.tokens * shape.vocab / jobs.tp
    width = np.maximum(shape.ffn, shape.shared_ffn + shape.top_k * shape.expert_ffn)
    working = (
        element * jobs.tokens * (1 + shape.gated) * width / jobs.tp + 4 * states + gathered_bytes(shape, jobs, engine)
    )
    # Before a layer is run again, what comes after it has let go.
    working = working + np.where(jobs.recompute == 2, np.maximum(kept.layer - kept.spared, 0.0), 0.0)
    left = np.where(alone, last * gradient * table, 0.0)
    # The head, its gradient on the way, a layer, its gradient on the way, the end; of each gradients, activations,
    # logits and what else is there for a moment.
    moments = (
        (last * gradient * table, activations + own, logit, last * (3 * states + weights * (table + of_layer))),
        (last * gradient * table, activations, 0 * logit, last * (flat * table + weights * of_layer)),
        (left + gradient * of_layer, activations, 0 * logit, working + 2 * weights * of_layer),
        (left + gradient * of_layer, activations - kept.last, 0 * logit, flat * of_layer + weights * of_layer),
        (
            np.where(alone, gradient * held.total, first * gradient * table),
            0 * activations,
            0 * logit,
            first * flat * table,
        ),
    )
    rows = [np.broadcast_arrays(*moment, kept.layer * jobs.tp) for moment in moments]
    totals = np.stack(np.broadcast_arrays(*(sum(row[:4]) for row in rows)))
    place = totals.argmax(axis=0)
    chosen = [np.choose(place, np.broadcast_arrays(*(row[part] for row in rows))) for part in range(4)]
    chosen[3] = chosen[3] + LIBRARIES
    return alone, Fullest(*chosen)
