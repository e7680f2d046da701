"""What the planner says of one rank of a job. No torch."""

from dataclasses import dataclass, replace

import numpy as np

from cuboid.cost.constants import at_host_speed, engine_named
from cuboid.cost.inputs import Shape
from cuboid.cost.muon import matrix_time
from cuboid.cost.sharding import optimizer_time, rank_parameters
from cuboid.planning.choose import predict
from cuboid.planning.collectives import step_collectives
from cuboid.planning.question import Question
from cuboid.planning.space import Space
from cuboid.planning.stages import LayerSeconds, held
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.ranks import coordinates
from cuboid.spec.run import Run

KINDS = {
    "parameters": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits", "transient"),
    "buffers": ("buffers", "reserve"),
}
"""Kind of memory that a rank reports -> lines of the plan."""


@dataclass(frozen=True)
class Expected:
    """The prediction for a rank."""

    memory: dict[str, float]
    """Bytes, by the kinds a rank reports."""
    seconds: float
    """Of its computing in a step: layers, embedding, head, update, and the copies that stand for what other ranks would
    send (`parallel.tensor_region`); no communication, no waiting."""
    precision: str
    """Of this prediction: the planner does not know float64, and takes float32 in its place."""


def expected(run: Run, rank: int, cluster: ClusterSpec, routing: float | None = None) -> Expected:
    """What one rank of a run should take on the accelerators of a cluster, whose number does not matter. `routing`:
    seconds of the probe's small layer with experts, where the host is not the cluster's."""
    engine = dict(cluster.measured.get("engine", {}))
    if routing is not None:
        engine |= at_host_speed(engine_named("cuboid"), routing)
    engine |= {"host_collective": 0.0, "host_crossing": 0.0, "host_jitter": 0.0}  # nothing is launched for collectives
    cluster = replace(cluster, measured={**cluster.measured, "engine": engine})
    training = run.training
    layout, batch = run.layout.as_replica(coordinates(rank, run.layout).dp, training.global_batch)
    precision = "float32" if training.precision == "float64" else training.precision
    question = Question(
        model=run.model,
        cluster=cluster,
        global_batch=batch,
        sequence=training.sequence,
        precision=precision,
        optimizer=run.planned_optimizer(),
        average=run.optimizer.average,
        gradient_sums=run.training.gradient_sums,
        fp8_scaling=run.training.fp8_scaling,
        fp8_experts=run.training.fp8_experts,
    )
    plan = predict(question, layout)
    stage = coordinates(rank, layout).pp
    run = replace(run, layout=layout, training=replace(training, global_batch=batch))
    row = plan.memory[stage]
    memory = {kind: sum(row[line] for line in lines) for kind, lines in KINDS.items()}
    return Expected(memory, _seconds(question, run, rank, stage), precision)


def _seconds(question: Question, run: Run, rank: int, stage: int) -> float:
    layout = run.layout
    space = Space.of([layout], question)
    part = held(run.model, layout, run.training.sequence)
    seconds = LayerSeconds.of(question, space.jobs)
    dense, mixture = (sum(way.alone for way in passes) for passes in (seconds.times.dense, seconds.times.mixture))
    first, last = (float(ends[stage]) for ends in part.ends())
    layers = float(part.by_rank(part.dense)[stage]) * dense + float(part.by_rank(part.mixture)[stage]) * mixture
    passes = space.jobs.micro_batches * (layers + first * seconds.parts.embedding + last * seconds.head)
    shape, count = Shape.of(run.model), np.asarray(part.layers[stage])
    owned = rank_parameters(shape, space.jobs, count, np.asarray(first), np.asarray(last))
    chip = question.machine.chip
    update = optimizer_time(space.jobs, chip, question.profile, owned, np.zeros(()))
    fabric = question.machine.fabric
    update = update + matrix_time(shape, space.jobs, chip, fabric, question.profile, count, np.asarray(first))
    copied = _copied(run, rank) / (chip.memory_bandwidth * chip.memory_efficiency)
    return float(np.ravel(passes + update)[0]) + copied


def _copied(run: Run, rank: int) -> float:
    """Bytes read and written in place of collectives; sums over all ranks and messages take nothing."""
    moved = 0.0
    for collective in step_collectives(run, rank):
        if collective.kind in ("all-gather", "reduce-scatter"):
            moved += collective.calls * collective.size * (1 + 1 / collective.ranks)
        elif collective.kind == "all-to-all" and collective.dimension == "ep":
            moved += collective.calls * collective.size * 2
    return moved
