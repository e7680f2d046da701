"""What no layout of a shape undercuts, whatever it recomputes, splits, schedules or hides: what a search need not look
at any closer."""

from dataclasses import replace
from functools import reduce

import numpy as np

from cuboid.cost.inputs import Array, Shape, number
from cuboid.cost.layers import LayerTimes, Pass
from cuboid.cost.pipeline import DUAL_PIPE_V, idle_by_schedule, in_flight, paired_share, partition, waited_transfers
from cuboid.cost.sharding import rank_parameters, reduction
from cuboid.cost.step import first_parameters, replica_time
from cuboid.planning.question import Question
from cuboid.planning.space import Space
from cuboid.planning.stages import LayerSeconds


def least_seconds(question: Question, space: Space, context: bool) -> Array:
    """Seconds of a step with equal stages, the schedule that waits least, and nothing else to wait for but what is
    inside layers. `context`: also for the keys of other ranks."""
    jobs = space.jobs
    seconds = LayerSeconds.of(question, jobs)

    def alone(each: Pass) -> Array:
        waits = each.tensor + each.expert + (each.context if context else 0.0)
        return np.maximum(each.compute + waits, each.floor)

    passes = [
        (alone(dense), alone(mixture))
        for dense, mixture in zip(seconds.times.dense, seconds.times.mixture, strict=True)
    ]
    return np.broadcast_to(_least(question, space, seconds, passes), len(space))


def likely_seconds(question: Question, space: Space) -> Array:
    """The same with the sums of gradients under ZeRO 1: no bound, but close to what is best."""
    shape, jobs, engine = Shape.of(question.model), space.jobs, question.profile
    least = least_seconds(question, space, True)
    layers, times = partition(shape, jobs, engine).first, LayerSeconds.of(question, jobs).times
    held = rank_parameters(shape, jobs, layers, np.ones(()), np.zeros(()))
    passes = (layers * times.mean("total", way) for way in (0, 1))
    return least + reduction(replace(jobs, zero=number(1)), question.machine.fabric, engine, held, *passes)


def least_busy(question: Question, space: Space, seconds: LayerSeconds) -> Array:
    """The same of layouts whose layers are known: seconds that no schedule and no partition takes away."""
    pairs = zip(seconds.times.dense, seconds.times.mixture, strict=True)
    return _least(question, space, seconds, [(dense.total, mixture.total) for dense, mixture in pairs])


def least_in_layers(question: Question, space: Space) -> Array:
    """The same, one for each layout."""
    return np.broadcast_to(least_busy(question, space, LayerSeconds.of(question, space.jobs)), len(space))


def least_with_sums(question: Question, space: Space) -> Array:
    """… with what replicas wait for, where ZeRO is known."""
    shape, jobs, engine, fabric = Shape.of(question.model), space.jobs, question.profile, question.machine.fabric
    seconds, stage = LayerSeconds.of(question, jobs), partition(shape, jobs, engine)
    held = first_parameters(shape, jobs, stage)
    waits = replica_time(shape, jobs, fabric, engine, stage, held, seconds.times, seconds.parts)
    return np.broadcast_to(least_busy(question, space, seconds) + waits, len(space))


def _least(question: Question, space: Space, seconds: LayerSeconds, passes: list[tuple[Array, Array]]) -> Array:
    """`passes`: forward and backward the seconds of a layer without and with experts."""
    shape, jobs, parts = Shape.of(question.model), space.jobs, seconds.parts
    leading, routed = shape.dense_layers, shape.layers - shape.dense_layers
    forward, backward = (leading * dense + routed * mixture for dense, mixture in passes)
    relief = routed * paired_relief(question, space, seconds.times)
    forward = (forward + parts.head_forward + 0.3 * parts.embedding) / jobs.pp
    backward = (backward + parts.head_backward + 0.7 * parts.embedding) / jobs.pp
    weight = shape.layers * (seconds.times.mean("compute", 0) - parts.attention_forward) + parts.head_forward
    weight = np.minimum(weight / jobs.pp, backward / 2)
    deepest = replace(jobs, vpp=np.maximum(np.floor(shape.layers / jobs.pp), 1.0))
    others = np.maximum(jobs.pp - 1, 0) * (forward + backward)
    idle = idle_by_schedule(deepest, forward, backward, weight, others)
    paired = idle.pop(DUAL_PIPE_V)
    busy = jobs.micro_batches * (forward + backward)
    if question.machine.chip.together < 1:  # ranks that share cores wait less than their own seconds say
        return busy
    least = busy + reduce(np.minimum, idle.values())
    return np.minimum(least, busy + paired - (jobs.micro_batches + jobs.pp) * relief / jobs.pp)


def paired_relief(question: Question, space: Space, times: LayerTimes) -> Array:
    """Most seconds of a layer with experts that the pairs of DualPipeV hide, where 1F1B waits."""
    engine, jobs = question.profile, space.jobs
    if not engine.expert_paired or question.model.mixture is None:
        return np.zeros(())
    dual = Space({**space.columns, "schedule": np.full(len(space), DUAL_PIPE_V)}, space.global_batch, space.sequence)
    forward, backward = times.mixture
    hidden = np.minimum(forward.expert, engine.expert_paired * backward.compute)
    hidden = hidden + np.minimum(backward.expert, engine.expert_paired * forward.compute)
    return np.where(jobs.pp > 1, paired_share(dual.jobs) * hidden, 0.0)


def least_transfer(question: Question, space: Space) -> Array:
    """Of the transfers that 1F1B waits for the share that every schedule does."""
    if not question.profile.transfer_scheduled:
        return np.ones(())
    jobs = space.jobs
    return np.maximum(jobs.pp - 2, 0.0) / np.maximum(waited_transfers(jobs, question.profile), 1.0)


def least_memory(question: Question, space: Space) -> Array:
    """Bytes of the first pipeline rank with everything split and recomputed."""
    shape, jobs, engine = Shape.of(question.model), space.jobs, question.profile
    layers = partition(shape, jobs, engine).first
    held = rank_parameters(shape, jobs, layers, np.ones(()), np.zeros(()))
    each = engine.weight_bytes + engine.gradient_bytes
    if not question.tries_offload and not question.fixed_offload:
        each += engine.optimizer_bytes
    split = question.fixed.get("shard", 0) or jobs.dp
    experts = np.maximum(split * jobs.cp * jobs.tp / jobs.ep, 1.0)
    states = each * (held.plain / (split * jobs.cp) + held.routed / experts)
    boundary = engine.kept_boundary * jobs.tokens * shape.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    return np.broadcast_to(states + layers * boundary * in_flight(jobs, np.zeros(())), len(space))
