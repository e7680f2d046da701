"""The time of one training step, put together from kernels, communication and the pipeline."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.communication import Group, all_gather, all_reduce, all_to_all, group, transfer
from cuboid.cost.compute import Kernels, kernels
from cuboid.cost.constants import Chip, Engine, Fabric
from cuboid.cost.flops import embedding_parameters, head_parameters, layer_parameters
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.pipeline import Partition, bubble, partition


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank; the parts add up to the total."""

    compute: Array
    tensor: Array
    """Waiting for tensor-parallel collectives."""
    context: Array
    expert: Array
    host: Array
    """Waiting for the host to launch kernels."""
    bubble: Array
    transfer: Array
    data: Array
    """Waiting for gradient reduction and parameter gathering."""
    optimizer: Array
    straggler: Array

    @property
    def total(self) -> Array:
        """Seconds of the step."""
        return sum((getattr(self, name) for name in PARTS), np.zeros(()))


PARTS = ("compute", "tensor", "context", "expert", "host", "bubble", "transfer", "data", "optimizer", "straggler")


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


def rank_parameters(shape: Shape, jobs: Jobs, layers: Array, first: Array, last: Array) -> RankParameters:
    """Parameters of a rank with so many layers, with the embedding (`first`) and the head (`last`) or without."""
    each = layer_parameters(shape)
    dense_share = np.where(shape.experts > 0, shape.dense_layers / shape.layers, 1.0)
    # The leading dense layers all sit on the first ranks.
    dense = np.where(shape.experts > 0, np.where(first > 0, np.minimum(shape.dense_layers, layers), 0.0), layers)
    dense = np.where(jobs.pp == 1, layers * dense_share, dense)
    mixture = layers - dense
    tables = first * embedding_parameters(shape)
    shared = (shape.tied > 0) & (first > 0)
    tables = tables + np.where(shared, 0.0, last * head_parameters(shape))
    plain = (dense * each.dense + mixture * each.mixture + tables) / jobs.tp
    return RankParameters(plain, mixture * each.routed / np.maximum(jobs.ep, 1))


@dataclass(frozen=True)
class Pass:
    """One layer of one micro-batch in one direction: seconds of each kind, and what the host adds to them."""

    compute: Array
    tensor: Array
    context: Array
    expert: Array
    host: Array

    @property
    def total(self) -> Array:
        """Seconds in all."""
        return self.compute + self.tensor + self.context + self.expert + self.host


def _pass(compute: Array, tensor: Array, context: Array, expert: Array, floor: Array) -> Pass:
    busy = compute + tensor + context + expert
    return Pass(compute, tensor, context, expert, np.maximum(floor - busy, 0.0))


def _exposed(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs) -> tuple[Array, Array, Array, Array]:
    """Communication of one layer forward that compute waits for: tensor, context, expert; and the crossing flag."""
    size = 2 * jobs.tokens * shape.hidden
    tensor_group = group(fabric, jobs.tp, np.ones(()))
    lost = 2 * fabric.spill * (tensor_group.nodes - 1) ** 0.7
    tensor = 2 * (all_reduce(fabric, size, tensor_group) * (1 - engine.tensor_overlap) + lost)
    context_group = group(fabric, jobs.cp, jobs.tp)
    keys = 4 * jobs.tokens * jobs.cp * np.maximum(shape.kv_heads / jobs.tp, 1) * shape.head_dim
    context = all_gather(fabric, keys, context_group) * (1 - engine.context_overlap)
    expert_group = group(fabric, jobs.ep, np.ones(()))
    token = 2 * jobs.tokens / jobs.tp * shape.hidden
    nodes = expert_group.nodes
    # Of a token's copies those to other nodes, or the other nodes that at least one of them goes to.
    apart = shape.top_k * (1 - 1 / nodes)
    distinct = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.top_k) if engine.expert_once else apart
    moved = all_to_all(fabric, token * shape.top_k, expert_group, token * distinct)
    expert = np.where(shape.experts > 0, 2 * moved, 0.0) * (1 - engine.expert_overlap)
    crosses = ((jobs.pp > 1) & (jobs.world_size / jobs.pp >= fabric.node)).astype(np.float64)
    return tensor, context, expert, crosses


@dataclass(frozen=True)
class LayerTimes:
    """A layer of each kind, forward and backward (recomputation included), under one layout."""

    dense: tuple[Pass, Pass]
    mixture: tuple[Pass, Pass]
    crosses: Array


def layer_times(
    shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, parts: Kernels, precision: str
) -> LayerTimes:
    """Seconds of one layer of one micro-batch."""
    tensor, context, expert, crosses = _exposed(engine, fabric, shape, jobs)
    every = engine.host_collective * (jobs.tp > 1) + engine.host_crossing * crosses * np.where(
        jobs.tp > 1, jobs.tp * np.sqrt(np.maximum(jobs.tp / fabric.node, 1.0)), 0.0
    )
    odd = (np.floor(jobs.micro_batch * shape.heads / jobs.tp) % 4 > 0) * engine.host_fallback
    every = every + (engine.host_forward * (jobs.tp - 1) * engine.host_jitter) + odd
    full, selective = jobs.recompute == 2, jobs.recompute == 1
    again = 1.0 + full

    low = engine.host_cast if precision in ("fp8", "fp4") else 0.0

    def directions(forward: Array, backward: Array, expert: Array, more: Array | float) -> tuple[Pass, Pass]:
        collective = every + more + low
        ahead = _pass(forward, tensor, context, expert, engine.host_forward + collective)
        repeated = np.where(full, forward, np.where(selective, parts.attention_forward, 0.0))
        floor = engine.host_backward + collective + np.where(full, engine.host_forward + collective, 0.0)
        back = _pass(backward + repeated, tensor * again, context * (1 + again), expert * again, floor)
        return ahead, back

    return LayerTimes(
        directions(parts.dense_forward, parts.dense_backward, np.zeros(()), 0.0),
        directions(parts.mixture_forward, parts.mixture_backward, expert, engine.host_mixture * (shape.experts > 0)),
        crosses,
    )


def _slowest(shape: Shape, stage: Partition, forward: Array, backward: Array, parts: Kernels) -> tuple[Array, Array]:
    """Seconds of one micro-batch on the slowest rank and on all ranks together."""
    layer = forward + backward
    head = parts.head_forward + parts.head_backward
    ends = np.maximum(stage.first * layer + parts.embedding, stage.last * layer + head)
    alone = shape.layers * layer + parts.embedding + head
    slowest = np.where(stage.first >= shape.layers, alone, np.maximum(ends, stage.middle * layer))
    return slowest, alone


def _data_parallel(
    shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, held: RankParameters, backward: Array
) -> Array:
    """Seconds of gradient reduction and parameter gathering that nothing hides (ZeRO 0 to 2)."""
    members: Group = group(fabric, jobs.dp * jobs.cp, jobs.tp)
    copies = np.maximum(jobs.dp * jobs.cp * jobs.tp / np.maximum(jobs.ep, 1), 1)
    expert_members = group(fabric, copies, np.maximum(jobs.ep, 1))
    reduce_plain = all_reduce(fabric, engine.gradient_wire * held.plain, members)
    scatter_plain = all_gather(fabric, engine.gradient_wire * held.plain, members)
    scatter_expert = all_gather(fabric, engine.gradient_wire * held.routed, expert_members)
    gather = all_gather(fabric, engine.parameter_wire * held.plain, members)
    gather = gather + all_gather(fabric, engine.parameter_wire * held.routed, expert_members)
    reduce = np.where(jobs.zero > 0, scatter_plain, reduce_plain)
    reduce = reduce + np.where(jobs.zero > 0, scatter_expert, 2 * scatter_expert)
    times = np.where((jobs.zero == 2) | engine.reduce_every_micro_batch, jobs.micro_batches, 1.0)
    hidden = engine.gradient_overlap * backward
    exposed = times * np.maximum(reduce - hidden, reduce * 0.05)
    gathered = np.where(jobs.zero > 0, gather * (1 - engine.gather_overlap), 0.0)
    return np.where(jobs.zero < 3, exposed + gathered, 0.0)


def _fully_sharded(shape: Shape, jobs: Jobs, fabric: Fabric, engine: Engine, times: LayerTimes) -> Array:
    """Seconds per micro-batch that ZeRO 3 traffic is not hidden behind the compute of its layers."""
    each = layer_parameters(shape)
    dense_share = np.where(shape.experts > 0, shape.dense_layers / shape.layers, 1.0)
    mean = dense_share * each.dense + (1 - dense_share) * (each.mixture + each.routed / np.maximum(jobs.ep, 1))
    members = group(fabric, jobs.shard * jobs.cp, jobs.tp)
    gather = all_gather(fabric, engine.parameter_wire * mean / jobs.tp, members)
    scatter = all_gather(fabric, engine.gradient_wire * mean / jobs.tp, members)
    replicas = group(fabric, jobs.dp / jobs.shard, jobs.tp * jobs.shard)
    scatter = scatter + all_reduce(fabric, engine.gradient_wire * mean / jobs.tp / jobs.shard, replicas)
    forward, backward = times.dense
    waits = np.maximum(gather - engine.shard_overlap * forward.total, 0.0)
    waits = waits + np.maximum(gather + scatter - engine.shard_overlap * backward.total, 0.0)
    layers = shape.layers / jobs.pp
    return np.where(jobs.zero == 3, waits * layers + (gather + scatter), 0.0)


def stall_depth(jobs: Jobs) -> Array:
    """How much of a stall in one rank the others see: measured stalls grow up to four pipeline ranks, then no more."""
    return np.asarray(np.minimum(np.log2(jobs.pp) + 1, 3.0) / 3.0)


def step_time(shape: Shape, jobs: Jobs, chip: Chip, fabric: Fabric, engine: Engine, precision: str) -> StepTime:
    """Seconds of one step and where they go."""
    parts = kernels(shape, jobs, chip, engine, precision)
    times = layer_times(shape, jobs, fabric, engine, parts, precision)
    stage = partition(shape, jobs, engine)
    dense_share = np.where(shape.experts > 0, shape.dense_layers / shape.layers, 1.0)

    def mean(name: str, direction: int) -> Array:
        dense, mixture = getattr(times.dense[direction], name), getattr(times.mixture[direction], name)
        return np.asarray(dense_share * dense + (1 - dense_share) * mixture)

    forward, backward = mean("total", 0), mean("total", 1)
    slowest, everything = _slowest(shape, stage, forward, backward, parts)
    per_layer = forward + backward
    # The slowest rank's time in units of layers; ends bring embedding or head along.
    layers = np.where(
        stage.first >= shape.layers, shape.layers, np.maximum(stage.first, np.maximum(stage.middle, stage.last))
    )
    layers = np.minimum(layers, slowest / per_layer)
    micro_batches = jobs.micro_batches
    compute = micro_batches * (slowest - layers * (per_layer - mean("compute", 0) - mean("compute", 1)))
    ranks = jobs.pp
    mean_forward = (shape.layers * forward + parts.head_forward + 0.3 * parts.embedding) / ranks
    mean_backward = (shape.layers * backward + parts.head_backward + 0.7 * parts.embedding) / ranks
    weight = (shape.layers * (mean("compute", 0) - parts.attention_forward) + parts.head_forward) / ranks
    idle = bubble(
        jobs, mean_forward, mean_backward, np.minimum(weight, mean_backward / 2), np.maximum(everything - slowest, 0)
    )
    sliced = (jobs.sequence_parallel > 0) | engine.transfer_split
    size = 2 * jobs.tokens * shape.hidden / np.where(sliced, jobs.tp, 1.0)
    hop = transfer(fabric, size, times.crosses) * (ranks > 1)
    steady = 2 * micro_batches * jobs.vpp * hop * engine.transfer_exposed
    fill = 2 * (ranks - 1) * hop
    held = rank_parameters(shape, jobs, stage.first, np.ones(()), (ranks == 1).astype(np.float64))
    last_backward = stage.first * backward
    data = _data_parallel(shape, jobs, fabric, engine, held, last_backward)
    data = data + micro_batches * _fully_sharded(shape, jobs, fabric, engine, times)
    owned = np.where(
        jobs.zero > 0, held.plain / jobs.shard + held.routed / np.maximum(jobs.shard / jobs.ep, 1), held.total
    )
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    optimizer = engine.optimizer_passes * owned / bandwidth + 4 * held.total / bandwidth
    host = engine.host_step + engine.host_micro_batch * micro_batches * (ranks > 1)
    if engine.host_unsharded:
        plain = (jobs.zero == 0) & (ranks > 1) & (jobs.dp > 1) & ((jobs.dp >= 4) | (jobs.world_size >= 64))
        host = host + engine.host_unsharded * stall_depth(jobs) * micro_batches * (plain & (shape.tied == 0))
    waits = {
        name: micro_batches * layers * (mean(name, 0) + mean(name, 1))
        for name in ("tensor", "context", "expert", "host")
    }
    nodes = np.maximum(jobs.world_size / fabric.node, 1.0)
    so_far = compute + sum(waits.values()) + idle
    return StepTime(
        compute,
        waits["tensor"],
        waits["context"],
        waits["expert"],
        waits["host"] + host,
        idle,
        steady + fill,
        data,
        optimizer,
        fabric.straggler * np.log2(nodes) * so_far,
    )
