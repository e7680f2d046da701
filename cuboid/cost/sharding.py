"""What data parallelism and ZeRO cost: parameters a rank holds and owns, and the traffic that keeps replicas equal."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.communication import ONE, all_gather, all_reduce, group, reduce_scatter
from cuboid.cost.compute import (
    layer_parameters,
    norm_parameters,
    position_parameters,
    projection_parameters,
    table_parameters,
)
from cuboid.cost.constants import Chip, Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape, pick
from cuboid.cost.layers import LayerTimes
from cuboid.cost.pipeline import is_v_shaped, partition
from cuboid.cost.reuse import Taking, each_once, recent


@dataclass(frozen=True)
class RankParameters:
    """Parameters a pipeline rank holds after tensor and expert parallelism."""

    plain: Array
    """All but routed experts; reduced over dp × cp."""
    routed: Array
    """Routed experts; reduced over dp × cp × tp / ep."""

    @property
    def total(self) -> Array:
        """All of them."""
        return self.plain + self.routed


def dense_layers_of(shape: Shape, jobs: Jobs, layers: Array, first: Array) -> Array:
    """Layers without experts on a rank: of a mixture the leading ones, which sit on the first rank."""
    if not shape.any_routes:
        return layers
    leading = np.where(first > 0, np.minimum(shape.dense_layers, layers), 0.0)
    spread = layers * shape.dense_layers / shape.layers
    return pick(shape.routes, np.where(jobs.pp == 1, spread, leading), layers)


def rank_parameters(shape: Shape, jobs: Jobs, layers: Array, first: Array, last: Array) -> RankParameters:
    """Parameters of a rank with so many layers, with the embedding (`first`) and the head (`last`) or without."""
    each = layer_parameters(shape, jobs.tp)
    dense = dense_layers_of(shape, jobs, layers, first)
    mixture = layers - dense
    shared = np.maximum(first, last)
    embedding = np.where(shape.predictions > 0, shared, first) if shape.any_predictions else first
    tables = pick(np.asarray(shape.tied > 0), shared, embedding + last) * table_parameters(shape, jobs.tp)
    outside = tables + first * position_parameters(shape) + last * norm_parameters(shape)
    plain = dense * each.dense + mixture * each.mixture + outside
    routed = mixture * each.routed
    if shape.any_predictions:
        layer = pick(shape.routes, each.mixture, each.dense)
        layer = layer + projection_parameters(shape) + 3 * norm_parameters(shape)
        plain = plain + last * shape.predictions * layer
        routed = routed + last * shape.predictions * pick(shape.routes, each.routed, 0.0)
    return RankParameters(plain, routed / np.maximum(jobs.ep, 1))


def embedding_apart(shape: Shape, jobs: Jobs) -> NDArray[np.bool_]:
    """Whether two pipeline ranks hold the token embedding: where it is the head too, or prediction layers read it."""
    return np.asarray(((shape.tied > 0) | (shape.predictions > 0)) & (is_v_shaped(jobs) == 0))


def owned_parameters(jobs: Jobs, held: RankParameters) -> Array:
    """Parameters whose optimizer state a rank keeps."""
    shard = np.where(jobs.zero > 0, jobs.shard * jobs.cp, 1.0)
    routed = np.where(jobs.zero > 0, np.maximum(jobs.shard * jobs.cp * jobs.tp / np.maximum(jobs.ep, 1), 1.0), 1.0)
    return jobs.fuller * (held.plain / shard + held.routed / routed)


def keeps_gradients(jobs: Jobs, engine: Engine) -> NDArray[np.bool_]:
    """Whether ZeRO 2 splits gradients only when all micro-batches have been added: FSDP in a pipeline's stages."""
    return np.asarray(engine.fsdp & (jobs.zero == 2) & (jobs.pp > 1))


def reduction(
    shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, held: RankParameters, forward: Array, backward: Array
) -> Array:
    """Seconds of gradient reduction and parameter gathering that nothing hides, with ZeRO 0 to 2. `forward`,
    `backward`: of one micro-batch."""
    # The profiles of others were fitted as if all replicas shared shards, and gathering hid behind anything.
    most = forward if engine.own_collectives else np.asarray(np.inf)

    def sums(some: Jobs, rows: Taking) -> tuple[Array, Array, Array]:
        return _summed(some, fabric, engine, rows(held))

    scatter, replicas, gather = each_once(shape, jobs, _decides_sums(jobs), sums)
    every = (jobs.zero == 2) & ~keeps_gradients(jobs, engine)
    times = np.where(every | engine.reduce_every_micro_batch, jobs.micro_batches, 1.0)

    def exposed(seconds: Array) -> Array:
        # However much overlaps, the last bucket has nothing left to hide behind.
        return np.maximum(seconds - engine.gradient_overlap * backward, seconds * 0.05)

    # Replicas of a shard are summed once a step, under the last backward pass.
    reduced = (times - 1) * exposed(scatter) + exposed(scatter + replicas)
    waits = reduced + gather - np.minimum(gather * engine.gather_overlap, most)
    if engine.fsdp:  # as under ZeRO 3, the next layer is gathered while one computes
        often = np.where(jobs.pp > 1, 1.0, jobs.micro_batches)
        gathered = often * np.maximum(gather - engine.shard_overlap * forward, 0.05 * gather)
        waits = np.where(jobs.zero == 2, reduced + gathered, waits)
    return np.where(jobs.zero < 3, waits, 0.0)


def _decides_sums(jobs: Jobs) -> tuple[Array, ...]:
    """All that the parameters of a rank and their groups depend on, for one model."""
    split = np.asarray(jobs.zero > 0, dtype=np.float64)
    return jobs.dp, jobs.tp, jobs.pp, jobs.cp, jobs.ep, jobs.dp / jobs.shard, split, is_v_shaped(jobs)


def _summed(jobs: Jobs, fabric: Fabric, engine: Engine, held: RankParameters) -> tuple[Array, Array, Array]:
    """Seconds to scatter gradients, to sum those of the replicas of a shard, and to gather parameters."""
    shard = jobs.shard if engine.own_collectives else jobs.dp
    copies = jobs.expert_copies
    shards = np.maximum(shard * jobs.cp * jobs.tp / np.maximum(jobs.ep, 1), 1)
    plain = _Sums(fabric, engine, held.plain, jobs.copies, shard * jobs.cp, jobs.tp)
    routed = _Sums(fabric, engine, held.routed, copies, shards, np.maximum(jobs.ep, 1))
    # Halves, and not one sum, because few engines join the reductions of experts.
    whole = plain.whole() + 2 * routed.scattered(copies)
    scatter = np.where(jobs.zero > 0, plain.scattered() + routed.scattered(), whole)
    replicas = np.where(jobs.zero > 0, plain.replicated() + routed.replicated(), 0.0)
    gather = np.where(jobs.zero > 0, plain.gathered() + routed.gathered(), 0.0)
    return scatter, replicas, gather


@recent
def free_time(jobs: Jobs, fabric: Fabric, times: LayerTimes, way: int) -> Array:
    """Seconds of a layer's pass in which what it sends itself leaves the links between replicas free."""
    replicas = group(fabric, jobs.copies, jobs.tp)
    experts = group(fabric, jobs.expert_copies, np.maximum(jobs.ep, 1))
    inside = ((replicas.nodes == 1) | (experts.nodes == 1)) * times.mean("inside", way)
    outside = ((replicas.nodes > 1) | (experts.nodes > 1)) * times.mean("outside", way)
    return np.asarray(times.mean("total", way) - np.maximum(inside, outside))


@dataclass(frozen=True)
class _Sums:
    """What keeps the holders of the same parameters equal: so many `ranks`, in groups of `shards`, a `stride` apart."""

    fabric: Fabric
    engine: Engine
    parameters: Array
    ranks: Array
    shards: Array
    stride: Array

    def whole(self) -> Array:
        members = group(self.fabric, self.ranks, self.stride)
        return all_reduce(self.fabric, self.engine.gradient_wire * self.parameters, members)

    def scattered(self, ranks: Array | None = None) -> Array:
        members = group(self.fabric, self.shards if ranks is None else ranks, self.stride)
        return reduce_scatter(self.fabric, self.engine.gradient_wire * self.parameters, members)

    def replicated(self) -> Array:
        members = group(self.fabric, self.ranks / self.shards, self.stride * self.shards)
        return all_reduce(self.fabric, self.engine.gradient_wire * self.parameters / self.shards, members)

    def gathered(self, wire: float = 0.0) -> Array:
        """`wire`: bytes of a parameter, where they are not those of the engine."""
        members = group(self.fabric, self.shards, self.stride)
        return all_gather(self.fabric, (wire or self.engine.parameter_wire) * self.parameters, members)


def fully_sharded(
    shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, times: LayerTimes, head: tuple[Array, Array]
) -> Array:
    """Seconds per step that ZeRO 3 traffic is not hidden behind the compute of its layers. Replicas of a shard are
    summed with every micro-batch, or, by this program, with the last. `head`: its seconds forward and backward."""
    if not np.any(jobs.zero == 3):
        return np.zeros(())
    fraction = times.dense_fraction

    def sums(some: Jobs, rows: Taking) -> tuple[_ShardSeconds, _ShardSeconds]:
        return _sharded(shape, some, fabric, engine, rows(fraction))

    layer, tables = each_once(shape, jobs, _decides_sums(jobs), sums)
    gather, scatter, replicated = layer.gather, layer.scatter, layer.replicated
    forward, backward = (free_time(jobs, fabric, times, way) for way in (0, 1))

    def waits(reduced: Array) -> Array:
        """Of one micro-batch."""
        waits = np.maximum(gather - engine.shard_overlap * forward, 0.0)
        waits = waits + np.maximum(gather + reduced - engine.shard_overlap * backward, 0.0)
        # Traffic that is hidden still slows the kernels it hides behind (Galvatron measured an eighth).
        waits = waits + engine.shard_contention * (2 * gather + reduced)
        held = np.ceil(shape.layers / jobs.pp) if engine.own_collectives else shape.layers / jobs.pp
        return waits * held + gather + reduced

    often = 1.0 if engine.own_collectives else jobs.micro_batches
    step = (jobs.micro_batches - often) * waits(scatter) + often * waits(scatter + replicated)
    if engine.own_collectives:
        step = step + jobs.micro_batches * np.maximum(tables.gather - engine.shard_overlap * head[0], 0.0)
        back = tables.gather + tables.scatter
        step = step + jobs.micro_batches * np.maximum(back - engine.shard_overlap * head[1], 0.0)
        step = step + tables.replicated
    return np.where(jobs.zero == 3, step, 0.0)


@dataclass(frozen=True)
class _ShardSeconds:
    """Seconds to gather parameters, to scatter their gradients, and to sum those of the replicas of a shard."""

    gather: Array
    scatter: Array
    replicated: Array


def _sharded(
    shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, dense_fraction: Array
) -> tuple[_ShardSeconds, _ShardSeconds]:
    """Those of a layer, and of the vocabulary tables."""
    each = layer_parameters(shape, jobs.tp)
    dense = dense_fraction * each.dense + (1 - dense_fraction) * each.mixture
    experts = (1 - dense_fraction) * each.routed / np.maximum(jobs.ep, 1)
    copies = jobs.expert_copies
    shards = np.maximum(jobs.shard * jobs.cp * jobs.tp / np.maximum(jobs.ep, 1), 1)
    plain = _Sums(fabric, engine, dense, jobs.copies, jobs.shard * jobs.cp, jobs.tp)
    # Experts have holders of their own: every ep-th rank, and so fewer ports of a node.
    routed = _Sums(fabric, engine, experts, copies, shards, np.maximum(jobs.ep, 1))
    gather = plain.gathered(engine.shard_wire) + routed.gathered()
    scatter = plain.scattered() + routed.scattered()
    replicated = plain.replicated() + routed.replicated()
    members = group(fabric, jobs.shard * jobs.cp, jobs.tp)
    slowed = np.maximum(members.nodes / 2, 1.0) ** engine.shard_decay
    held = _tables(shape, jobs) * table_parameters(shape, jobs.tp)
    tables = _Sums(fabric, engine, held, jobs.copies, jobs.shard * jobs.cp, jobs.tp)
    return (
        _ShardSeconds(gather * slowed, scatter * slowed, replicated * slowed),
        _ShardSeconds(tables.gathered(), tables.scattered(), tables.replicated()),
    )


def _tables(shape: Shape, jobs: Jobs) -> Array:
    """Vocabulary tables on the pipeline rank with most of them."""
    own = np.where((shape.tied == 0) & (is_v_shaped(jobs) > 0), 2.0, 1.0)
    return np.asarray(own + shape.predictions)


def tied_sum(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine) -> Array:
    """Seconds to sum the gradient of an embedding over the two pipeline ranks that hold it, or their shards."""
    apart = embedding_apart(shape, jobs)
    # So far apart, and yet on one node where all ranks are.
    stride = np.where(jobs.world_size > fabric.node, jobs.world_size / jobs.pp * np.maximum(jobs.pp - 1, 1), 1.0)
    pair = group(fabric, np.where(apart, 2.0, 1.0), stride)
    shards = np.where((jobs.zero > 0) & engine.own_collectives, jobs.shard * jobs.cp, 1.0)
    return all_reduce(fabric, engine.gradient_wire * table_parameters(shape, jobs.tp) / shards, pair)


# Optimizer state in CPU memory: what it takes there, and what bringing it to the accelerator and back costs.


def host_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes that the first pipeline rank, which holds the most parameters, keeps in CPU memory."""
    held = rank_parameters(shape, jobs, partition(shape, jobs, engine).first, ONE, is_v_shaped(jobs))
    return np.asarray(jobs.offload * engine.optimizer_bytes * owned_parameters(jobs, held))


def brought_bytes(jobs: Jobs, engine: Engine, held: RankParameters) -> Array:
    """Bytes of offloaded state that are on the accelerator at once; none where it lies there."""
    elements = jobs.offload * np.minimum(engine.offload_elements, owned_parameters(jobs, held))
    return np.asarray(engine.optimizer_bytes * elements)


def offloaded_update(chip: Chip, engine: Engine, owned: Array, here: Array, forward: Array) -> Array:
    """Seconds of an update whose state is in CPU memory that nothing hides. `here`: those of one whose state is
    on the accelerator; `forward`: of the forward pass that follows."""
    if not engine.offload_elements:  # gradients go to the host, which updates, and weights come back
        moved = engine.gradient_wire + engine.parameter_wire + engine.optimizer_passes
        return np.asarray(moved * owned / chip.host_link)
    # Both ways at once; the pass that follows starts as soon as its first weights are there, and slows down by what the
    # update computes beside it.
    whole = np.maximum(engine.optimizer_bytes * owned / chip.host_link, here)
    return np.asarray(np.maximum(whole - forward, np.maximum(0.05 * whole, here)))


def optimizer_time(jobs: Jobs, chip: Chip, engine: Engine, held: RankParameters, forward: Array) -> Array:
    """Seconds of the optimizer step. `forward`: of one micro-batch's forward pass, under which an offloaded update
    continues."""
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    owned = owned_parameters(jobs, held)
    here = engine.optimizer_passes * owned / bandwidth
    there = offloaded_update(chip, engine, owned, here, forward)
    return np.asarray(np.where(jobs.offload > 0, there, here) + 4 * held.total / bandwidth)
