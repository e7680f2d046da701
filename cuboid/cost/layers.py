"""One layer of one micro-batch under a layout: kernels, the communication they wait for, and the host's floor."""

from dataclasses import dataclass, field, fields

import numpy as np

from cuboid.cost.alike import each_once
from cuboid.cost.communication import ONE, Links, all_to_all, group, stage_transfer
from cuboid.cost.compute import Kernels, adds_nothing
from cuboid.cost.constants import Fabric
from cuboid.cost.context import further_blocks, waiting
from cuboid.cost.engine import Engine
from cuboid.cost.inputs import Array, Jobs, Shape, number
from cuboid.cost.mixing import heavier, lighter, mixed, mixes
from cuboid.cost.pipeline import DUAL_PIPE_V, paired_share, splits_backward
from cuboid.cost.recent import recent
from cuboid.cost.tensor import tensor_waits

ZERO = np.zeros(())


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
    dense_share: Array
    """Share of the layers that have no experts."""
    crosses: Array
    """1 where transfers between stages leave the node."""
    _means: dict[tuple[str, int], Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    def mean(self, name: str, direction: int) -> Array:
        """Seconds of one kind in one direction, averaged over the layers."""
        known = self._means.get((name, direction))
        if known is None:
            dense, mixture = getattr(self.dense[direction], name), getattr(self.mixture[direction], name)
            known = np.asarray(self.dense_share * dense + (1 - self.dense_share) * mixture)
            self._means[name, direction] = known
        return known


def _expert(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs) -> tuple[Array, Links]:
    """Waiting for tokens on their way to experts and back, and for how long they hold links."""
    if not np.any(shape.experts > 0):
        return ZERO, Links(ZERO, ZERO)
    members = group(fabric, jobs.ep, ONE)
    token = engine.activation_wire * jobs.tokens / jobs.tp * shape.hidden
    # Of a token's copies those to other nodes, or the other nodes that at least one of them goes to.
    apart = shape.top_k * (1 - 1 / members.nodes)
    distinct = (members.nodes - 1) * (1 - (1 - 1 / members.nodes) ** shape.top_k) if engine.expert_once else apart
    moved = all_to_all(fabric, token * shape.top_k, members, token * distinct)
    whole = np.where(shape.experts > 0, 2 * moved, 0.0)
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
    more = _alike(shape, heavier(jobs), fabric, engine, parts, precision)
    if not mixes(jobs):
        return more
    less = _alike(shape, lighter(jobs), fabric, engine, parts, precision)

    def mean(one: Pass, other: Pass) -> Pass:
        return Pass(
            *(mixed(jobs, shape.layers, getattr(one, item.name), getattr(other, item.name)) for item in fields(Pass))
        )

    def both(one: tuple[Pass, Pass], other: tuple[Pass, Pass]) -> tuple[Pass, Pass]:
        return mean(one[0], other[0]), mean(one[1], other[1])

    return LayerTimes(both(more.dense, less.dense), both(more.mixture, less.mixture), more.dense_share, more.crosses)


def _alike(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, parts: Kernels, precision: str) -> LayerTimes:
    """Where all layers are recomputed alike."""
    columns = [jobs.tp, jobs.cp, jobs.cp_method, jobs.cp_inner, jobs.ep, jobs.micro_batch, jobs.recompute]
    columns += [jobs.sequence_parallel, adds_nothing(jobs), _crosses(jobs, fabric), number(splits_backward(jobs))]
    if engine.expert_paired:
        pairs = (jobs.schedule == DUAL_PIPE_V) & (jobs.pp > 1)
        columns += [pairs * jobs.pp, pairs * jobs.dp]
    return each_once(
        shape, jobs, columns, lambda some, rows: _each(shape, some, fabric, engine, rows(parts), precision)
    )


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
    again = 1.0 + (full | (selective & engine.own_exchanges))
    paired = paired_share(jobs) * (engine.expert_paired > 0)

    def one(compute: Array, tensor: Array, context: Array, expert: Array, floor: Array, links: Links) -> Pass:
        busy = compute + tensor + context + expert
        host = np.maximum(floor - busy, 0.0)
        held = links + Links.of(members, tensor)
        inside, outside = (np.minimum(each, busy + host) for each in (held.inside, held.outside))
        return Pass(compute, tensor, context, expert, host, floor, inside, outside)

    def both(
        forward: Array, backward: Array, tensor: tuple[Array, Array], experts: tuple[Array, Links], more: Array
    ) -> tuple[Pass, Pass]:
        expert, travels = experts
        ahead = engine.host_forward + added + more + blocks
        back = engine.host_backward + added + more + 2 * blocks + np.where(full, ahead, 0.0)
        again_light = parts.light_forward if engine.compiled else parts.attention_forward
        repeated = np.where(full, forward, np.where(selective, again_light, 0.0))
        backward = backward + repeated
        # In a pair each pass computes while the tokens of the other travel.
        ahead_waits = expert - paired * np.minimum(expert, engine.expert_paired * backward)
        back_waits = expert * again - paired * np.minimum(expert * again, engine.expert_paired * forward)
        links = waits.links[0] + travels, waits.links[1] + waits.links[0].times(full) + travels.times(again)
        behind = one(backward, tensor[1], context_back + full * context, back_waits, back, links[1])
        return one(forward, tensor[0], context, ahead_waits, ahead, links[0]), behind

    routing = np.where(shape.experts > 0, engine.host_mixture, 0.0)
    expert = _expert(engine, fabric, shape, jobs)
    return LayerTimes(
        both(parts.dense_forward, parts.dense_backward, tensor.dense, (ZERO, Links(ZERO, ZERO)), ZERO),
        both(parts.mixture_forward, parts.mixture_backward, tensor.mixture, expert, routing),
        np.where(shape.experts > 0, shape.dense_layers / shape.layers, 1.0),
        crosses,
    )


def transfer_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes one rank sends to the next stage per micro-batch."""
    sliced = (jobs.sequence_parallel > 0) | engine.transfer_split
    return np.asarray(engine.activation_wire * jobs.tokens * shape.hidden / np.where(sliced, jobs.tp, 1.0))


def hop(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine) -> Array:
    """Seconds a micro-batch is on its way to the next stage, on average over the stages."""
    return stage_transfer(fabric, transfer_bytes(shape, jobs, engine), jobs)
