"""One layer of one micro-batch under a layout: kernels, the communication they wait for, and the host's floor."""

from dataclasses import dataclass, field, fields

import numpy as np

from cuboid.cost.communication import (
    ONE,
    Group,
    Links,
    all_gather,
    all_reduce,
    all_to_all,
    group,
    one_port,
    reduce_scatter,
    stage_transfer,
)
from cuboid.cost.compute import GATHER, Kernels, adds_nothing
from cuboid.cost.constants import Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape, heavier, lighter, mixed, mixes, number, pick
from cuboid.cost.pipeline import DUAL_PIPE_V, paired_fraction, splits_backward
from cuboid.cost.reuse import each_once, recent

# What tensor-parallel ranks wait for in a layer.


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
    if not engine.own_collectives:
        layer = 2 * whole, 2 * whole * (1.0 + (jobs.recompute == 2))
        return TensorWaits(layer, layer)
    down = shape.kv_rank + shape.rope_dim
    entered = whole
    if shape.any_latent:
        latent = np.where(shape.q_rank > 0, summed(shape.q_rank + down), whole + summed(down))
        entered = pick(shape.is_latent, latent, whole)
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
        # A norm behind the last sum needs it again.
        dense=(
            attention + feed_forward,
            attention_back + feed_back + again * (enter.forward + shape.post_norms * leave.forward),
        ),
        mixture=(
            attention + shared * feed_forward + together.forward,
            attention_back + shared * (shared_back + again * feed_forward) + together.backward,
        ),
    )


def _border(split: Array, forward: Array, backward: Array, whole_forward: Array, whole_backward: Array) -> _Border:
    """Where sequences are split, and where they are whole."""
    return _Border(np.where(split > 0, forward, whole_forward), np.where(split > 0, backward, whole_backward))


# What context-parallel ranks wait for in a layer, by the way they bring queries and keys together.
#
# An inner group trades heads for tokens (all of cp with ulysses, none with a ring), an outer group then brings in keys
# and values: in a ring, behind the computing with those at hand, or all at once.


@dataclass(frozen=True)
class Widths:
    """Elements a token has on one rank."""

    query: Array
    keys: Array
    """Keys and values together."""
    output: Array

    @classmethod
    def of(cls, shape: Shape, jobs: Jobs) -> "Widths":
        """Key-value heads are repeated where fewer than the ranks that trade heads."""
        latent = shape.is_latent
        heads = shape.heads / jobs.tp
        shared = pick(latent, heads, np.maximum(shape.kv_heads / jobs.tp, 1))
        shared = np.lcm(np.rint(shared).astype(np.int64), jobs.cp_inner.astype(np.int64))
        query = pick(latent, shape.nope_dim + shape.rope_dim, shape.head_dim)
        value = pick(latent, shape.v_dim, shape.head_dim)
        return cls(heads * query, shared * (query + value), heads * value)


def outer_group(fabric: Fabric, jobs: Jobs) -> Group:
    """The ranks that pass keys and values on."""
    return group(fabric, jobs.cp / jobs.cp_inner, jobs.tp * jobs.cp_inner)


@dataclass(frozen=True)
class ContextWaits:
    """Seconds in one layer, forward and backward without what recomputation repeats."""

    seconds: tuple[Array, Array]
    links: tuple[Links, Links]
    """What is held for how long, hidden or not."""


def waiting(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs, attention: tuple[Array, Array]) -> ContextWaits:
    """What ranks wait for. `attention`: the seconds that its core computes forward and backward."""
    widths, token = Widths.of(shape, jobs), engine.activation_wire * jobs.tokens
    inner, outer = group(fabric, jobs.cp_inner, jobs.tp), outer_group(fabric, jobs)
    given = token * (widths.query + widths.keys + widths.output)
    heads = all_to_all(fabric, given, inner, given * (1 - 1 / inner.nodes))
    rings = (outer.size > 1) & (jobs.cp_method != GATHER)
    whole = token * widths.keys * outer.size
    if shape.any_windows:
        whole = np.where(rings, whole * passed_fraction(shape, jobs, outer.size), whole)
    # In a ring the rank at the end of a node sends its message alone, whoever else has a port there.
    passed = np.where(rings, all_gather(fabric, whole, one_port(outer)), all_gather(fabric, whole, outer))
    # A ring hides a message behind the computing of one of its steps, if that takes as long.
    fraction = (outer.size - 1) / outer.size
    hidden = [
        np.minimum(engine.context_overlap * times * passed, fraction * seconds)
        for times, seconds in zip((1, 2), attention, strict=True)
    ]
    forward, backward = (times * passed - rings * saved for times, saved in zip((1, 2), hidden, strict=True))
    traded, brought = Links.of(inner, heads), Links.of(outer, passed)
    return ContextWaits((heads + forward, heads + backward), (traded + brought, traded + brought.times(2)))


def passed_fraction(shape: Shape, jobs: Jobs, ranks: Array) -> Array:
    """Of what a ring passes on, the part that layers send, as a mean over layers. In a window each of a rank's two
    chunks sees so many keys before it, at most those of all others."""
    others = np.maximum(ranks - 1, 1) / ranks * jobs.sequence
    seen = np.minimum(2 * np.maximum(shape.window - 1, 0.0), others) / others
    return np.asarray(1 - shape.windowed * (1 - seen))


def further_blocks(jobs: Jobs) -> Array:
    """Blocks of attention beside the first: one more for every rank of a ring, three with gathered keys."""
    outer = jobs.cp / jobs.cp_inner
    return np.where(jobs.cp_method == GATHER, 3.0, outer - 1) * (outer > 1)


@recent
def gathered_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """All keys and values of a layer, and their gradients, while it is computed."""
    gathered = 2 * engine.activation_wire * jobs.tokens * jobs.cp * Widths.of(shape, jobs).keys
    return np.where((jobs.cp_method == GATHER) & (jobs.cp > 1), gathered, 0.0)


ZERO = np.zeros(())
FOR_WEIGHTS = 0.5
"""Of the seconds that the host adds to a backward pass."""


@dataclass(frozen=True)
class Pass:
    """A layer in one direction: seconds of each kind, and what the host adds to them."""

    compute: Array
    tensor: Array
    context: Array
    expert: Array
    host: Array
    floor: Array
    """Seconds of the host, whatever the device takes."""
    inside: Array
    """Seconds in which what the layer sends holds the links inside a node, hidden or not."""
    outside: Array
    """… those between nodes."""

    @property
    def alone(self) -> Array:
        """Seconds of a rank that waits for nobody."""
        return np.maximum(self.compute, self.floor)

    @property
    def total(self) -> Array:
        """Seconds in all."""
        return self.compute + self.tensor + self.context + self.expert + self.host


@dataclass(frozen=True)
class LayerTimes:
    """A layer of each kind, forward and backward (recomputation included)."""

    dense: tuple[Pass, Pass]
    mixture: tuple[Pass, Pass]
    dense_fraction: Array
    """Fraction of the layers that have no experts."""
    crosses: Array
    """1 where transfers between stages leave the node."""
    _means: dict[tuple[str, int], Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    def mean(self, name: str, direction: int) -> Array:
        """Seconds of one kind in one direction, averaged over the layers."""
        known = self._means.get((name, direction))
        if known is None and self.mixture is self.dense:
            known = self._means[name, direction] = getattr(self.dense[direction], name)
        if known is None:
            dense, mixture = getattr(self.dense[direction], name), getattr(self.mixture[direction], name)
            known = np.asarray(self.dense_fraction * dense + (1 - self.dense_fraction) * mixture)
            self._means[name, direction] = known
        return known

    def put_off(self, attention: Array) -> Array:
        """Seconds of a layer's backward pass that a schedule may put off: its weight gradients take as long as the
        matmuls forward, and as many launches as those of inputs."""
        return self.mean("compute", 0) - attention + FOR_WEIGHTS * self.mean("host", 1)


def _expert(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs) -> tuple[Array, Links]:
    """Waiting for tokens on their way to experts and back, and for how long they hold links."""
    if not shape.any_routes:
        return ZERO, Links(ZERO, ZERO)
    members = group(fabric, jobs.ep, ONE)
    token = engine.activation_wire * jobs.tokens / jobs.tp * shape.hidden
    # Of a token's copies those to other nodes, or the other nodes that at least one of them goes to.
    apart = shape.top_k * (1 - 1 / members.nodes)
    distinct = (members.nodes - 1) * (1 - (1 - 1 / members.nodes) ** shape.top_k) if engine.expert_once else apart
    moved = all_to_all(fabric, token * shape.top_k, members, token * distinct)
    whole = pick(shape.routes, 2 * moved, ZERO)
    return whole * (1 - engine.expert_overlap), Links.of(members, whole)


def _host(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs, crosses: Array, precision: str) -> Array:
    """What the layout and the precision add to the host's time of a pass."""
    spread = jobs.tp * np.sqrt(np.maximum(jobs.tp / fabric.node, 1.0))
    together = engine.host_collective + engine.host_crossing * crosses * spread
    odd = (np.floor(jobs.micro_batch * shape.heads / jobs.tp) % 4 > 0) * engine.host_fallback
    low = engine.host_cast if precision in ("fp8", "fp4") else 0.0
    jitter = engine.host_forward * engine.host_jitter * (jobs.tp - 1)
    return np.where(jobs.tp > 1, together, 0.0) + jitter + odd + low


@recent
def layer_times(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, parts: Kernels, precision: str) -> LayerTimes:
    """Seconds of one layer of one micro-batch, by kind of layer; the mean where not all are recomputed alike."""
    if not mixes(jobs):
        return _alike(shape, jobs, fabric, engine, parts, precision)
    more = _alike(shape, heavier(jobs), fabric, engine, parts, precision)
    less = _alike(shape, lighter(jobs), fabric, engine, parts, precision)

    def mean(one: Pass, other: Pass) -> Pass:
        return Pass(
            *(mixed(jobs, shape.layers, getattr(one, item.name), getattr(other, item.name)) for item in fields(Pass))
        )

    def both(one: tuple[Pass, Pass], other: tuple[Pass, Pass]) -> tuple[Pass, Pass]:
        return mean(one[0], other[0]), mean(one[1], other[1])

    return LayerTimes(both(more.dense, less.dense), both(more.mixture, less.mixture), more.dense_fraction, more.crosses)


def _alike(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, parts: Kernels, precision: str) -> LayerTimes:
    """Where all layers are recomputed alike."""
    columns = decides_layers(jobs, fabric, engine)
    return each_once(
        shape, jobs, columns, lambda some, rows: _each(shape, some, fabric, engine, rows(parts), precision)
    )


def decides_layers(jobs: Jobs, fabric: Fabric, engine: Engine) -> list[Array]:
    """All that the seconds of a layer depend on, where all layers are recomputed alike."""
    columns = [jobs.tp, jobs.cp, jobs.cp_method, jobs.cp_inner, jobs.ep, jobs.micro_batch, jobs.recompute]
    columns += [
        jobs.sequence_parallel,
        adds_nothing(jobs),
        adds_nothing(jobs, routed=True),
        _crosses(jobs, fabric),
        number(splits_backward(jobs)),
    ]
    if engine.expert_paired:
        pairs = (jobs.schedule == DUAL_PIPE_V) & (jobs.pp > 1)
        columns += [pairs * jobs.pp, pairs * jobs.dp]
    return columns


def _crosses(jobs: Jobs, fabric: Fabric) -> Array:
    return ((jobs.pp > 1) & (jobs.world_size / jobs.pp >= fabric.node)).astype(np.float64)


def _each(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, parts: Kernels, precision: str) -> LayerTimes:
    crosses = _crosses(jobs, fabric)
    core = (parts.attention_forward, parts.attention_backward)
    tensor = tensor_waits(engine, fabric, shape, jobs, parts)
    waits = waiting(engine, fabric, shape, jobs, core)
    context, context_back = waits.seconds
    members = group(fabric, jobs.tp, ONE)
    added = _host(engine, fabric, shape, jobs, crosses, precision)
    blocks = engine.host_block * further_blocks(jobs)
    full, selective = jobs.recompute == 2, jobs.recompute == 1
    again = 1.0 + (full | (selective & engine.own_collectives))
    paired = paired_fraction(jobs) * (engine.expert_paired > 0)

    def one(compute: Array, tensor: Array, context: Array, expert: Array, floor: Array, links: Links) -> Pass:
        busy = compute + tensor + context + expert
        host = np.maximum(floor - busy, 0.0)
        held = links + Links.of(members, tensor)
        inside, outside = (np.minimum(each, busy + host) for each in (held.inside, held.outside))
        return Pass(compute, tensor, context, expert, host, floor, inside, outside)

    def both(
        forward: Array,
        backward: Array,
        light: Array,
        tensor: tuple[Array, Array],
        experts: tuple[Array, Links],
        more: Array,
    ) -> tuple[Pass, Pass]:
        expert, travels = experts
        ahead = engine.host_forward + added + more + blocks
        # Selective recomputation, too, sends tokens to their experts again.
        once_more = np.where(full, ahead, np.where(selective & engine.compiled, more, 0.0)) * engine.repeated_launches
        back = engine.host_backward + added + more + 2 * blocks + once_more
        again_light = light if engine.compiled else parts.attention_forward
        repeated = np.where(full, forward, np.where(selective, again_light, 0.0))
        backward = backward + repeated
        # In a pair each pass computes while the tokens of the other travel.
        ahead_waits = expert - paired * np.minimum(expert, engine.expert_paired * backward)
        back_waits = expert * again - paired * np.minimum(expert * again, engine.expert_paired * forward)
        links = waits.links[0] + travels, waits.links[1] + waits.links[0].times(full) + travels.times(again)
        behind = one(backward, tensor[1], context_back + full * context, back_waits, back, links[1])
        return one(forward, tensor[0], context, ahead_waits, ahead, links[0]), behind

    routing = np.where(shape.routes, engine.host_mixture, 0.0)
    nowhere = (ZERO, Links(ZERO, ZERO))
    dense = both(parts.dense_forward, parts.dense_backward, parts.light_forward, tensor.dense, nowhere, ZERO)
    if not shape.any_routes:
        return LayerTimes(dense, dense, np.ones(()), crosses)
    expert = _expert(engine, fabric, shape, jobs)
    return LayerTimes(
        dense,
        both(parts.mixture_forward, parts.mixture_backward, parts.light_mixture, tensor.mixture, expert, routing),
        np.where(shape.routes, shape.dense_layers / shape.layers, 1.0),
        crosses,
    )


@dataclass(frozen=True)
class HeadSeconds:
    """Of the head and the loss; with prediction layers, of each the layer too, what it begins with, and the head."""

    forward: Array
    backward: Array
    weight: Array
    """Of the backward pass, what a schedule may put off."""

    @property
    def both(self) -> Array:
        """Forward and backward."""
        return self.forward + self.backward


def head_seconds(shape: Shape, parts: Kernels, times: LayerTimes) -> HeadSeconds:
    """`times`: of the layers; a prediction layer is like the last of them."""
    head = HeadSeconds(parts.head_forward, parts.head_backward, parts.head_forward)
    if not shape.any_predictions:
        return head
    forward, backward = times.mixture
    begins = parts.projection + 0.3 * parts.embedding
    each = HeadSeconds(
        forward.total + begins + head.forward,
        backward.total + 2 * parts.projection + 0.7 * parts.embedding + head.backward,
        forward.compute - parts.attention_forward + FOR_WEIGHTS * backward.host + parts.projection + head.weight,
    )
    return HeadSeconds(
        head.forward + shape.predictions * each.forward,
        head.backward + shape.predictions * each.backward,
        head.weight + shape.predictions * each.weight,
    )


def transfer_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes one rank sends to the next stage per micro-batch."""
    sliced = (jobs.sequence_parallel > 0) | engine.transfer_split
    return np.asarray(engine.activation_wire * jobs.tokens * shape.hidden / np.where(sliced, jobs.tp, 1.0))


def hop(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine) -> Array:
    """Seconds a micro-batch is on its way to the next stage, on average over the stages."""
    return stage_transfer(fabric, transfer_bytes(shape, jobs, engine), jobs)
