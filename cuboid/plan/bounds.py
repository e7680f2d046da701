"""What no layout of a shape undercuts, whatever it recomputes, splits, schedules or hides: what a search need not look
at any closer."""

import numpy as np

from cuboid.cost.inputs import Array, Shape
from cuboid.cost.layers import LayerTimes, Pass
from cuboid.cost.pipeline import DUAL_PIPE_V, in_flight, paired_share, partition, waited_transfers
from cuboid.cost.sharding import rank_parameters
from cuboid.plan.question import Question
from cuboid.plan.space import Space
from cuboid.plan.stages import LayerSeconds


def least_seconds(question: Question, space: Space, context: bool) -> Array:
    """Seconds of a step with equal stages, no bubble and nothing to wait for but what is inside layers. `context`:
    also for the keys of other ranks."""
    shape, jobs = Shape.of(question.model), space.jobs
    seconds = LayerSeconds.of(question, jobs)

    def alone(each: Pass) -> Array:
        waits = each.tensor + each.expert + (each.context if context else 0.0)
        return np.maximum(each.compute + waits, each.floor)

    dense, mixture = (alone(each[0]) + alone(each[1]) for each in (seconds.times.dense, seconds.times.mixture))
    mixture = np.maximum(mixture - paired_relief(question, space, seconds.times), 0.0)
    body = shape.dense_layers * dense + (shape.layers - shape.dense_layers) * mixture
    whole = body + seconds.parts.embedding + seconds.head
    return np.broadcast_to(jobs.micro_batches * whole / jobs.pp, len(space))


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
