"""What a rank holds at its fullest moment, line by line."""

from dataclasses import dataclass, fields
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.compute import adds_nothing, kv_parts, layer_parameters, table_parameters
from cuboid.cost.constants import Engine
from cuboid.cost.inputs import Array, Jobs, Kept, Shape, heavier, lighter, mixes, pick, recomputed, single
from cuboid.cost.layers import gathered_bytes
from cuboid.cost.muon import matrices, matrix_bytes
from cuboid.cost.pipeline import Partition, in_flight, is_v_shaped, partition
from cuboid.cost.reuse import recent
from cuboid.cost.sharding import (
    RankParameters,
    brought_bytes,
    dense_layers_of,
    embedding_apart,
    keeps_gradients,
    rank_parameters,
)

# Communicators of a rank, as `parallel/groups.py` makes them, and the memory they take on its accelerator.


@dataclass(frozen=True)
class Communicators:
    """Of the rank that belongs to most."""

    collective: Array
    """Groups of two ranks and more with collectives."""
    peers: Array
    """Other ranks in these, added up."""
    links: Array
    """Pairs of pipeline neighbours, one for each direction, with messages alone."""


def communicators(shape: Shape, jobs: Jobs, matrices_travel: bool = False) -> Communicators:
    """`matrices_travel`: between the ranks of a stage, which have a communicator of their own then."""
    copies = jobs.copies
    parts = kv_parts(shape, jobs.tp)
    experts, zero = shape.experts > 0, jobs.zero > 0
    expert_copies = copies * jobs.tp / jobs.ep
    expert_shard = np.maximum(np.where(zero, jobs.shard * jobs.cp * jobs.tp / jobs.ep, 1.0), 1.0)
    hybrid = (jobs.shard != jobs.dp) & (jobs.shard > 0)
    shard = np.where(zero, jobs.shard * jobs.cp, 1.0)
    none = np.ones(())
    # Of kinds that come to the same ranks, a stride and a size, one communicator is made.
    shared = [
        (jobs.tp, copies),
        (none, jobs.tp),
        (jobs.ep, np.where(experts, expert_copies, 1.0)),
        (jobs.ep, np.where(experts & zero, expert_shard, 1.0)),
        (jobs.ep * expert_shard, np.where(experts & zero, expert_copies / expert_shard, 1.0)),
        (none, np.where(experts, jobs.cp * jobs.tp, 1.0)),
    ]
    sizes = [
        np.where(
            reduce(np.logical_or, ((stride == other) & (size == same) for other, same in shared[:number])), 1.0, size
        )
        if number
        else size
        for number, (stride, size) in enumerate(shared)
    ]
    sizes += [
        jobs.world_size,
        np.where(experts, jobs.ep, 1.0),
        np.where(hybrid, shard, 1.0),
        np.where(hybrid, copies / shard, 1.0),
        jobs.cp_inner,
        jobs.cp / jobs.cp_inner,
        np.where(parts > 1, jobs.tp / parts, 1.0),
        np.where(embedding_apart(shape, jobs) & (jobs.pp > 1), 2.0, 1.0),
        # One that is there already, where it comes to the same ranks.
        np.where(matrices_travel & (jobs.pp > 1) & (jobs.tp > 1) & (copies > 1), copies * jobs.tp, 1.0),
    ]
    return Communicators(
        collective=np.asarray(sum(np.where(size > 1, 1.0, 0.0) for size in sizes)),
        peers=np.asarray(sum(size - 1 for size in sizes)),
        links=2 * np.minimum(jobs.pp - 1, 2.0),
    )


@recent
def communicator_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes on the accelerator, beside what `engine.fixed` holds."""
    found = communicators(shape, jobs, engine.matrix_steps > 0)
    library = engine.communicator_first * (found.collective > 0)
    collective = engine.communicator * found.collective + engine.communicator_peer * found.peers
    return np.asarray(library + collective + engine.communicator_link * found.links)


# What a rank of this program holds on a GPU, where blocks are compiled: counted from what the code keeps, tensor by
# tensor, at each moment of a step that can be the fullest.


LIBRARIES = 75e6
"""Bytes of workspaces that libraries of matmuls take for themselves."""
WIDE = 4.0
"""Bytes of a number in float32."""


def compiled_kept(shape: Shape, jobs: Jobs, engine: Engine) -> tuple[Array, Array]:
    """Bytes one micro-batch keeps in a layer for its backward, without and with experts.

    Of every layer: its input and the sum after attention; queries, keys, values, what attention gave and the sums of
    its exponentials. With nothing recomputed also the inputs of matmuls, which tensor ranks gather whole; selective
    recomputation makes, and gathers, these again. In fp8 they are kept in fp8."""
    element = engine.activation_wire
    split = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    inputs = np.where(jobs.recompute == 1, 0.0, engine.fp8_input if engine.fp8_activations else element)
    plain = (2 * shape.heads + 2 * np.maximum(shape.kv_heads, jobs.tp)) * shape.head_dim
    latent = shape.heads * (2 * (shape.nope_dim + shape.rope_dim) + 2 * shape.v_dim)
    seen = shape.heads * pick(shape.is_latent, shape.v_dim, shape.head_dim)
    each = shape.hidden * (2 * element / split + inputs) + 8 / split
    each = each + (element * pick(shape.is_latent, latent, plain) + 4 * shape.heads) / jobs.tp
    # Queries and keys before their norm, where there is one; after it they are made again.
    normed = shape.qk_norm * (shape.heads + np.maximum(shape.kv_heads, jobs.tp)) * shape.head_dim
    each = each + np.where(jobs.recompute == 1, 0.0, element * normed / jobs.tp)
    each = each + (inputs * seen / jobs.tp if engine.fp8_activations else 0.0)
    # What norms behind attention and feed-forward block take; selective recomputation sums it again.
    each = each + shape.post_norms * np.where(jobs.recompute == 1, 0.0, 2 * element * shape.hidden / split)
    # Latents are gathered in place of the input they come of; with nothing recomputed values stay beside the keys that
    # came of the same matmul.
    latents = element * ((shape.q_rank + shape.kv_rank) * (1 + 1 / split) + shape.rope_dim)
    latents = latents - inputs * shape.hidden * (1 - 1 / split) + inputs * shape.heads * shape.nope_dim / jobs.tp
    each = each + pick(shape.is_latent, latents, 0.0)
    inner = (element * (1 + shape.gated) + inputs) / jobs.tp
    # Of experts selective recomputation keeps what every matmul gives, the last one too, and the input of all; else the
    # input is among those of matmuls.
    selective = jobs.recompute == 1
    rows = np.where(selective, element, engine.kept_routed) * shape.hidden
    routed = shape.top_k / jobs.tp * (inner * jobs.tp * shape.expert_ffn + rows)
    again = np.where(selective, element * shape.hidden * ((shape.shared_ffn > 0) + 1) / split, 0.0)
    # A router has its input and its scores in float32; each choice has its places before and after the journey.
    routing = np.where(selective, 0.0, (WIDE * shape.hidden + 12 * shape.experts + 48 * shape.top_k) / jobs.tp)
    shared = inner * shape.shared_ffn + (shape.shared_ffn > 0) * inputs * shape.hidden
    dense = jobs.tokens * (each + inputs * shape.hidden + inner * shape.ffn)
    mixture = jobs.tokens * (each + shared + routed + again + routing)
    return dense, pick(shape.routes, mixture, dense)


@dataclass(frozen=True)
class Fullest:
    """The fullest moment of a step, beside what is always there."""

    gradients: Array
    """As the backward pass computed them, not yet summed."""
    activations: Array
    logits: Array
    transient: Array


def keeps_routed(jobs: Jobs) -> NDArray[np.bool_]:
    """Whether gradients of routed experts stay as the backward pass leaves them, because nobody else has any."""
    return np.asarray(adds_nothing(jobs, routed=True) > 0)


def fullest(
    shape: Shape,
    jobs: Jobs,
    engine: Engine,
    held: RankParameters,
    kept: Kept,
    activations: Array,
    first: Array,
    last: Array,
    update: Array,
) -> tuple[Array, Fullest]:
    """Whether gradients stay as the backward pass leaves them (one micro-batch, nobody to add), and the moment.
    `update`: bytes that the update needs after the end."""
    element = engine.activation_wire
    each = layer_parameters(shape, jobs.tp)
    of_layer = pick(shape.routes, each.mixture + each.routed / np.maximum(jobs.ep, 1), 0.0)
    of_layer = np.maximum(of_layer, each.dense)
    table = table_parameters(shape, jobs.tp)
    states = jobs.tokens * shape.hidden * element
    gradient = element  # bytes of one that autograd made
    alone = (
        (jobs.dp * jobs.cp * jobs.tp == 1)
        & (jobs.micro_batches == 1)
        & (~embedding_apart(shape, jobs) | (jobs.pp == 1))
    )
    sharded, gathered = (jobs.zero >= 2) & ~alone, jobs.zero == 3
    left_routed = np.where(keeps_routed(jobs) & ~alone, gradient * held.routed, 0.0)
    # Shards of gradients that ZeRO 1 has summed over ranks wait for the end of the step, beside the whole.
    shard, expert_shard = jobs.shard * jobs.cp, jobs.shard * jobs.cp * jobs.tp / np.maximum(jobs.ep, 1)
    summed = np.where(shard > 1, held.plain / shard, 0.0)
    summed = summed + np.where((expert_shard > 1) & ~keeps_routed(jobs), held.routed / expert_shard, 0.0)
    summed = np.where((jobs.zero == 1) & ~alone, engine.gradient_bytes * jobs.fuller * summed, 0.0)
    flat = np.where(
        sharded, engine.gradient_bytes * (1 + jobs.fuller / (jobs.shard * jobs.cp)), 0.0
    )  # per parameter of a unit being reduced
    weights = np.where(gathered, element, 0.0)  # per parameter of a unit in use, and of the next one
    heads = last * (1 + shape.predictions)
    own = heads * (states / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0) + states)  # what the head itself keeps
    logit = heads * element * jobs.tokens * shape.vocab / jobs.tp
    width = np.maximum(shape.ffn, shape.shared_ffn + shape.top_k * shape.expert_ffn)
    working = (
        element * jobs.tokens * (1 + shape.gated) * width / jobs.tp + 4 * states + gathered_bytes(shape, jobs, engine)
    )
    # Before a layer is run again, what comes after it has let go.
    working = working + np.where(jobs.recompute == 2, np.maximum(kept.layer - kept.spared, 0.0), 0.0)
    left = np.where(alone, last * gradient * table, 0.0)
    # The head, its gradient on the way, a layer, its gradient on the way, the first layer, the end; of each gradients,
    # activations, logits and what else is there for a moment.
    moments = (
        (last * gradient * table, activations + own, logit, last * (3 * states + weights * (table + of_layer))),
        (last * gradient * table, activations, 0 * logit, last * (flat * table + weights * of_layer)),
        (left + gradient * of_layer, activations, 0 * logit, working + 2 * weights * of_layer),
        (left + gradient * of_layer, activations - kept.last, 0 * logit, flat * of_layer + weights * of_layer),
        # The first layer, when the gradients of all others have come.
        (left + left_routed, np.where(jobs.recompute == 2, 0.0, kept.layer), 0 * logit, working + summed),
        (
            np.where(alone, gradient * held.total, first * gradient * table) + left_routed,
            0 * activations,
            0 * logit,
            np.maximum(first * flat * table + summed, update),
        ),
    )
    totals = [grads + there + logits + more for grads, there, logits, more in moments]
    most = reduce(np.maximum, totals)
    parts = list(moments[-1])
    for total, moment in zip(totals[-2::-1], moments[-2::-1], strict=True):
        first_most = total == most  # of moments that are as full the first
        parts = [np.where(first_most, each, part) for each, part in zip(moment, parts, strict=True)]
    grads, there, logits, more = parts
    return alone, Fullest(grads, there, logits, more + LIBRARIES)


@dataclass(frozen=True)
class Memory:
    """Bytes on one pipeline rank at its peak; the lines add up to the total."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    """Kept between forward and backward by the micro-batches in flight."""
    logits: Array
    transient: Array
    """Alive only for a moment: what one layer works with, or the optimizer step."""
    buffers: Array
    """Communication buffers, context, libraries."""

    @property
    def total(self) -> Array:
        """Bytes in all."""
        return np.asarray(sum(getattr(self, item.name) for item in fields(self)))


@recent
def kept_per_layer(shape: Shape, jobs: Jobs, engine: Engine) -> tuple[Array, Array]:
    """Bytes one micro-batch keeps in a layer for its backward, without and with experts."""
    if engine.compiled:
        return compiled_kept(shape, jobs, engine)
    split = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    tokens = jobs.tokens
    hidden = tokens * shape.hidden * (engine.kept_hidden / split + engine.kept_whole)
    plain = (2 * shape.heads + 2 * np.maximum(shape.kv_heads, jobs.tp)) * shape.head_dim
    latent = shape.heads * (2 * (shape.nope_dim + shape.rope_dim) + 2 * shape.v_dim)
    query = engine.kept_query * tokens * pick(shape.is_latent, latent, plain) / jobs.tp
    query = query + pick(shape.is_latent, 2 * tokens * (2 * shape.q_rank + 2 * shape.kv_rank + shape.rope_dim), 0.0)
    if not engine.fused_attention:
        scores = engine.kept_scores * jobs.micro_batch * shape.heads / jobs.tp * jobs.sequence**2
        query = query + np.where(jobs.recompute == 1, 0.0, scores)
    inner = engine.kept_ffn * tokens * (1 + shape.gated) / jobs.tp
    dense = hidden + query + inner * shape.ffn
    fraction = np.where(jobs.recompute == 1, engine.kept_selective, 1.0)
    copies = tokens * shape.top_k / jobs.tp
    routed = copies * (engine.kept_ffn * (1 + shape.gated) * shape.expert_ffn + engine.kept_routed * shape.hidden)
    mixture = hidden + query + inner * shape.shared_ffn + routed
    return fraction * dense, fraction * pick(shape.routes, mixture, dense)


def _split(jobs: Jobs, held: RankParameters, bytes_each: float, from_stage: int) -> Array:
    """Bytes of something kept per parameter that ZeRO splits from some stage on."""
    shard = jobs.shard * jobs.cp
    expert_shard = np.maximum(shard * jobs.tp / np.maximum(jobs.ep, 1), 1.0)
    parts = bytes_each * jobs.fuller * (held.plain / shard + held.routed / expert_shard)
    return np.where(jobs.zero >= from_stage, parts, bytes_each * held.total)


def _kept(shape: Shape, jobs: Jobs, engine: Engine, layers: Array, first: Array, again: Array | None) -> Kept:
    """`again`: as `rank_memory` has it."""
    split = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)

    def of(jobs: Jobs, each: tuple[Array, Array], layers: Array, dense_layers: Array) -> Array:
        boundary = layers * engine.kept_boundary * jobs.tokens * shape.hidden / split
        return np.where(jobs.recompute == 2, boundary, dense_layers * each[0] + (layers - dense_layers) * each[1])

    each = kept_per_layer(shape, jobs, engine)
    dense_layers = dense_layers_of(shape, jobs, layers, first)
    alike = of(jobs, each, layers, dense_layers)
    if not mixes(jobs):
        return Kept(alike, np.maximum(*each), np.maximum(*each), np.zeros(()))
    some, less = jobs.recompute_layers > 0, lighter(jobs)
    again = recomputed(jobs, layers) if again is None else again
    # Layers without experts come first in a mixture.
    dense_again = pick(shape.routes, np.minimum(dense_layers, jobs.recompute_layers), again)
    last = kept_per_layer(shape, less, engine)
    spared = of(less, last, layers - again, dense_layers - dense_again)
    return Kept(
        np.where(some, of(jobs, each, again, dense_again) + spared, alike),
        np.maximum(*each),
        np.where(some, np.maximum(*last), np.maximum(*each)),
        np.where(some, spared / jobs.vpp, 0.0),
    )


JOINED = 7.0
"""Numbers of the width of the residual stream that a prediction layer keeps of a token beside its block: the embedded
token and its norm, that of what it reads, both side by side, and what goes in and out of its last norm."""


def predictions_kept(shape: Shape, jobs: Jobs, engine: Engine, rank: Array) -> Array:
    """Bytes that prediction layers keep for their backward, in the last stage."""
    if not shape.any_predictions:
        return np.zeros(())
    split = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    width = engine.activation_wire * jobs.tokens * shape.hidden / split
    layer = np.where(jobs.recompute == 2, width, kept_per_layer(shape, jobs, engine)[1])
    # A V's last stage is run backward at once.
    flight = np.where((is_v_shaped(jobs) > 0) & (jobs.pp > 1), 1.0, in_flight(jobs, rank))
    return np.asarray(shape.predictions * flight * (layer + JOINED * width))


def kept_fraction(shape: Shape, jobs: Jobs, engine: Engine) -> float:
    """What a layer of one layout keeps that is recomputed more, over what one keeps that is recomputed less."""
    one, middle = np.ones(()), np.zeros(())  # of a mixture's layers most have experts
    more, less = (_kept(shape, kind, engine, one, middle, None).layers for kind in (heavier(jobs), lighter(jobs)))
    return single(more) / single(less)


def _working(shape: Shape, jobs: Jobs, engine: Engine, kept: Kept, logit: Array) -> Array:
    """Bytes alive only while a layer or the loss is computed."""
    working = np.where(jobs.recompute == 2, kept.layer, engine.working_layer * kept.layer)
    if mixes(jobs):
        ahead = np.maximum(working - kept.spared, engine.working_layer * kept.last)
        working = np.where(jobs.recompute_layers > 0, ahead, working)
    gathered: Array = gathered_bytes(shape, jobs, engine)
    working = np.maximum(working + gathered, engine.working_logit * logit)
    # Gathered inputs pile up where the host runs ahead of the device; a shallow pipeline, and a wide group over many
    # nodes, keep it back (nanotron's rows: all of it without a pipeline and from eight stages on, none with two).
    ahead = np.where(jobs.pp == 1, 1.0, np.clip((np.log2(jobs.pp) - 1) / 2, 0.0, 1.0) * (jobs.tp <= 16))
    return working + ahead * (jobs.tp > 1) * engine.working_whole * jobs.tokens * shape.hidden


def _gathered(jobs: Jobs, engine: Engine, held: RankParameters, layers: Array, weights: Array, grads: Array) -> Array:
    """Bytes beside the shards: two gathered layers with ZeRO 3, one layer's gradients from ZeRO 2 on."""
    one = held.total / np.maximum(layers, 1)
    whole_weights, whole_gradients = engine.weight_bytes * held.total, engine.gradient_bytes * held.total
    more_weights = np.minimum(2 * engine.parameter_wire * one, whole_weights - weights)
    more_gradients = np.minimum(engine.gradient_bytes * one, whole_gradients - grads)
    return np.where(jobs.zero == 3, more_weights, 0.0) + np.where(jobs.zero >= 2, more_gradients, 0.0)


def rank_memory(
    shape: Shape,
    jobs: Jobs,
    engine: Engine,
    layers: Array,
    rank: Array,
    first: Array,
    last: Array,
    again: Array | None = None,
) -> Memory:
    """Bytes on the pipeline rank numbered `rank`, which holds so many layers, the embedding and the head or neither.

    `again`: how many of its layers are recomputed more than the others; default: as many as in even stages."""
    held = rank_parameters(shape, jobs, layers, first, last)
    weights = _split(jobs, held, engine.weight_bytes, 3)
    gradients = _split(jobs, held, engine.gradient_bytes, 2)
    gradients = np.where(keeps_gradients(jobs, engine), engine.gradient_bytes * held.total, gradients)
    optimizer = _split(jobs, held, engine.optimizer_bytes, 1)
    if engine.matrix_steps:
        found = matrices(shape, jobs, layers + last * shape.predictions, first)
        rest = RankParameters(held.plain - found.plain, held.routed - found.routed)
        optimizer = optimizer + _split(jobs, rest, engine.second_bytes, 1)
    optimizer = np.where(jobs.offload > 0, brought_bytes(jobs, engine, held), optimizer)
    update = matrix_bytes(shape, jobs, engine, layers, first)
    kept = _kept(shape, jobs, engine, layers, first, again)
    activations = in_flight(jobs, rank) * kept.layers + last * predictions_kept(shape, jobs, engine, rank)
    if engine.compiled:
        # From both neighbours one message is received ahead, and the gradient that is being used has come from one.
        split = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        message = engine.activation_wire * jobs.tokens * shape.hidden / split
        activations = activations + ((1 - first) + 2 * (1 - last)) * message
        alone, moment = fullest(shape, jobs, engine, held, kept, activations, first, last, update)
        summed = np.where(keeps_routed(jobs), gradients - engine.gradient_bytes * held.routed, gradients)
        gradients = np.where(alone, 0.0, summed) + moment.gradients
        buffers = np.asarray(engine.fixed + communicator_bytes(shape, jobs, engine))
        lines = (moment.activations, moment.logits, moment.transient, buffers)
        return Memory(weights, gradients, optimizer, *lines)
    logit = last * (1 + shape.predictions) * jobs.tokens * shape.vocab / jobs.tp
    logits = engine.kept_logit * logit
    working = _working(shape, jobs, engine, kept, logit)
    working = working + _gathered(jobs, engine, held, layers, weights, gradients)
    update = update + _split(jobs, held, engine.update_bytes, 1)
    transient = np.maximum(working, update - activations - logits)
    each = layer_parameters(shape, jobs.tp)
    one_layer = pick(shape.routes, each.mixture, each.dense) + last * table_parameters(shape, jobs.tp)
    buffers = (
        engine.fixed
        + communicator_bytes(shape, jobs, engine)
        + engine.buffer_bytes * held.total
        + engine.buffer_layer * one_layer
    )
    buffers = buffers + engine.buffer_expert * each.routed / np.maximum(jobs.ep, 1)
    return Memory(weights, gradients, optimizer, activations, logits, transient, buffers)


def memory_by_rank(shape: Shape, jobs: Jobs, engine: Engine) -> dict[str, Memory]:
    """The first pipeline rank, the one after it, and the last: one of them is the fullest."""
    stage: Partition = partition(shape, jobs, engine)
    one, none = np.ones(()), np.zeros(())
    alone, folded = (jobs.pp == 1).astype(np.float64), is_v_shaped(jobs)
    return {
        "first": rank_memory(shape, jobs, engine, stage.first, none, one, folded),
        "second": rank_memory(shape, jobs, engine, stage.middle, np.minimum(jobs.pp - 1, 1.0), alone, alone),
        "last": rank_memory(shape, jobs, engine, stage.last, jobs.pp - 1, alone, np.where(alone > 0, 1.0, 1 - folded)),
    }


def first_memory(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes of the first pipeline rank, often the fullest and never fuller than that."""
    stage: Partition = partition(shape, jobs, engine)
    first = rank_memory(shape, jobs, engine, stage.first, np.zeros(()), np.ones(()), is_v_shaped(jobs))
    return np.asarray(engine.reserve * first.total)


def peak_memory(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes of the fullest rank, as the engine's own reports count them."""
    totals = [memory.total for memory in memory_by_rank(shape, jobs, engine).values()]
    return np.asarray(engine.reserve * np.maximum.reduce(np.broadcast_arrays(*totals)))
