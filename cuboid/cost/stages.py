"""What every stage of one layout costs, for the simulator: the detailed path beside the closed forms of `pipeline`."""

from collections.abc import Sequence

from cuboid.cost.compute import kernels
from cuboid.cost.constants import engine_for
from cuboid.cost.engine import Engine
from cuboid.cost.estimate import Machine
from cuboid.cost.inputs import Jobs, Shape, single
from cuboid.cost.layers import hop, layer_times
from cuboid.cost.mixing import heavier, lighter
from cuboid.schedule.simulate import StageCosts
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec


def even_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; what does not divide goes to the stages between, then to the first."""
    each, left = divmod(layers, stages)
    order = [*range(1, stages - 1), 0, stages - 1]
    longer = set(order[:left]) if stages > 1 else set()
    return [each + (stage in longer) for stage in range(stages)]


def stage_costs(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    *,
    global_batch: int,
    sequence: int,
    engine: Engine | str = "cuboid",
    precision: str = "bf16",
    layers: Sequence[int] | None = None,
) -> tuple[StageCosts, float]:
    """Seconds of one micro-batch on every stage, and of a transfer; `layers` says how many each stage holds."""
    profile = engine_for(engine, machine.chip).in_precision(precision)
    shape, jobs = Shape.of(model), Jobs.of([layout], global_batch=global_batch, sequence=sequence)
    parts = kernels(shape, jobs, machine.chip, profile, precision)
    more, less = (
        layer_times(shape, kind, machine.fabric, profile, parts, precision) for kind in (heavier(jobs), lighter(jobs))
    )
    counts = list(layers) if layers is not None else even_layers(model.layers, layout.stages)
    dense_layers = model.mixture.first_dense_layers if model.mixture else model.layers

    forward, inputs, weights = [], [], []
    start = 0
    for stage, count in enumerate(counts):
        dense = max(min(dense_layers - start, count), 0)
        again = min(layout.recompute_layers or count, count)
        dense_again = min(dense, again)
        kinds = (
            (dense_again, more.dense),
            (again - dense_again, more.mixture),
            (dense - dense_again, less.dense),
            (count - dense - (again - dense_again), less.mixture),
        )
        ahead = sum(number * single(passes[0].total) for number, passes in kinds)
        back = sum(number * single(passes[1].total) for number, passes in kinds)
        weight = sum(number * (single(passes[0].compute) - single(parts.attention_forward)) for number, passes in kinds)
        if stage == 0:
            ahead, back = ahead + 0.3 * single(parts.embedding), back + 0.7 * single(parts.embedding)
        if stage == len(counts) - 1:
            ahead, back = ahead + single(parts.head_forward), back + single(parts.head_backward)
            weight += single(parts.head_forward)
        weight = min(weight, back / 2)
        forward.append(ahead)
        inputs.append(back - weight)
        weights.append(weight)
        start += count
    message = hop(shape, jobs, machine.fabric, profile)
    costs = StageCosts(forward=tuple(forward), input_backward=tuple(inputs), weight_backward=tuple(weights))
    return costs, single(message) if layout.pp > 1 else 0.0
