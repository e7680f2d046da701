"""The time of one training step, made of kernels, communication and the pipeline."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.communication import ONE
from cuboid.cost.compute import Kernels, kernels
from cuboid.cost.constants import Chip, Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.layers import HeadSeconds, LayerTimes, head_seconds, hop, layer_times
from cuboid.cost.muon import matrix_time
from cuboid.cost.pipeline import Partition, bubble, is_v_shaped, partition, waited_transfers, with_shared_cores
from cuboid.cost.sharding import (
    RankParameters,
    free_time,
    fully_sharded,
    optimizer_time,
    rank_parameters,
    reduction,
    tied_sum,
)

PARTS = ("compute", "tensor", "context", "expert", "host", "bubble", "transfer", "data", "optimizer", "straggler")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank; the parts add up to the total."""

    compute: Array
    tensor: Array
    """Waiting for tensor-parallel collectives."""
    context: Array
    """… for keys and values of other context-parallel ranks."""
    expert: Array
    """… for tokens on their way to experts and back."""
    host: Array
    """… for the host to launch kernels."""
    bubble: Array
    """… for other stages."""
    transfer: Array
    """… for activations and gradients between stages."""
    data: Array
    """… for gradient reduction and parameter gathering."""
    optimizer: Array
    straggler: Array
    """… for the slowest of many nodes."""

    @property
    def total(self) -> Array:
        """Seconds of the step."""
        return np.asarray(sum(getattr(self, name) for name in PARTS))


def _slowest(
    shape: Shape, jobs: Jobs, stage: Partition, layer: Array, parts: Kernels, head: Array
) -> tuple[Array, Array]:
    """Seconds of one micro-batch on the slowest rank and on all ranks together."""
    folded = is_v_shaped(jobs)
    first = stage.first * layer + parts.embedding + folded * head
    ends = np.maximum(first, stage.last * layer + (1 - folded) * head)
    everything = shape.layers * layer + parts.embedding + head
    slowest = np.where(stage.first >= shape.layers, everything, np.maximum(ends, stage.middle * layer))
    return slowest, everything


def _idle(shape: Shape, jobs: Jobs, times: LayerTimes, parts: Kernels, head: HeadSeconds, others: Array) -> Array:
    """Seconds of the pipeline's bubble."""
    forward = (shape.layers * times.mean("total", 0) + head.forward + 0.3 * parts.embedding) / jobs.pp
    backward = (shape.layers * times.mean("total", 1) + head.backward + 0.7 * parts.embedding) / jobs.pp
    weight = (shape.layers * times.put_off(parts.attention_forward) + head.weight) / jobs.pp
    return bubble(jobs, forward, backward, np.minimum(weight, backward / 2), np.maximum(others, 0.0))


def stall_depth(jobs: Jobs) -> Array:
    """How much of a stall in one rank the others see: measured stalls grow up to four pipeline ranks, then no more."""
    return np.asarray(np.minimum(np.log2(jobs.pp) + 1, 3.0) / 3.0)


def _host(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Seconds of the host beside those of the layers."""
    piped = jobs.micro_batches * (jobs.pp > 1)
    host = engine.host_step + engine.host_micro_batch * piped
    if engine.host_unsharded:
        plain = (jobs.zero == 0) & (jobs.dp > 1) & ((jobs.dp >= 4) | (jobs.world_size >= 64)) & (shape.tied == 0)
        host = host + engine.host_unsharded * stall_depth(jobs) * piped * plain
    return np.asarray(host)


def first_parameters(shape: Shape, jobs: Jobs, stage: Partition) -> RankParameters:
    """Those of the first pipeline rank."""
    return rank_parameters(shape, jobs, stage.first, ONE, is_v_shaped(jobs))


def replica_time(
    shape: Shape,
    jobs: Jobs,
    fabric: Fabric,
    engine: Engine,
    stage: Partition,
    held: RankParameters,
    times: LayerTimes,
    parts: Kernels,
) -> Array:
    """Seconds of a step in which ranks wait for gradients to be summed and parameters to be gathered."""
    free = [stage.first * free_time(jobs, fabric, times, way) for way in (0, 1)]
    head = head_seconds(shape, parts, times)
    data = reduction(shape, jobs, fabric, engine, held, *free)
    if shape.any_routes and np.any((shape.dense_layers > 0) & shape.routes & (jobs.pp > 1)):
        # The first rank holds the leading layers without experts: others may have more to sum.
        between = rank_parameters(shape, jobs, stage.middle, 0 * ONE, 0 * ONE)
        data = np.where(jobs.pp > 2, np.maximum(data, reduction(shape, jobs, fabric, engine, between, *free)), data)
    data = data + fully_sharded(shape, jobs, fabric, engine, times, (head.forward, head.backward))
    if engine.own_collectives:  # in the rows of others it is part of what was fitted
        data = data + tied_sum(shape, jobs, fabric, engine)
    return data


def step_time(shape: Shape, jobs: Jobs, chip: Chip, fabric: Fabric, engine: Engine, precision: str) -> StepTime:
    """Seconds of one step and where they go."""
    parts = kernels(shape, jobs, chip, engine, precision)
    times = layer_times(shape, jobs, fabric, engine, parts, precision)
    stage = partition(shape, jobs, engine)
    layer = times.mean("total", 0) + times.mean("total", 1)
    head = head_seconds(shape, parts, times)
    alone, everything = _slowest(shape, jobs, stage, layer, parts, head.both)
    slowest = with_shared_cores(chip, alone, everything / jobs.pp)
    fullest = np.maximum(stage.first, np.maximum(stage.middle, stage.last))
    # The slowest rank may be one with fewer layers and the head: its other parts count as compute.
    layers = np.minimum(np.where(stage.first >= shape.layers, shape.layers, fullest), slowest / layer)
    count = jobs.micro_batches
    names = ("tensor", "context", "expert", "host")
    waits = {name: count * layers * (times.mean(name, 0) + times.mean(name, 1)) for name in names}
    compute = count * slowest - sum(waits.values())
    idle = _idle(shape, jobs, times, parts, head, everything - alone)
    if chip.together < 1:
        idle = np.maximum(chip.together * (count * alone + idle) - count * slowest, 0.0)
    message = hop(shape, jobs, fabric, engine) * (jobs.pp > 1)
    moving = 2 * message * waited_transfers(jobs, engine)
    held = first_parameters(shape, jobs, stage)
    forward = stage.first * times.mean("total", 0)
    data = replica_time(shape, jobs, fabric, engine, stage, held, times, parts)
    doublings = np.log2(np.maximum(jobs.world_size / fabric.node, 1.0))
    return StepTime(
        compute=np.asarray(compute),
        tensor=waits["tensor"],
        context=waits["context"],
        expert=waits["expert"],
        host=waits["host"] + _host(shape, jobs, engine),
        bubble=idle,
        transfer=moving,
        data=data,
        optimizer=optimizer_time(jobs, chip, engine, held, forward)
        + matrix_time(shape, jobs, chip, fabric, engine, stage.first, ONE),
        straggler=fabric.straggler * doublings * (count * slowest + idle),
    )
