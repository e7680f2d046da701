"""Jobs that run on the ranks of the pool, and the short run they share."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cuboid.cli.verify import verification_run
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.pool import Pool
from cuboid.model.initialize import RECIPES, initialize
from cuboid.model.split_backward import Deferral
from cuboid.model.transformer import Transformer
from cuboid.parallel.parallelize import build_engine, draw_weights
from cuboid.parallel.stage import Segment
from cuboid.planning import collectives as step_collectives
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.training.layer_norms import LayerNorms
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import evaluate, start_step, train_step

CPU = torch.device("cpu")


def small_run(layout: str, *overrides: str, model: str = "tiny-llama", micro_batches: int = 2) -> Run:
    """Two steps of short sequences and a layer more than there are stages, or as many as the layout names; enough
    micro-batches to accumulate."""
    plan = Layout.parse(layout)
    most = verification_run("dp=1", model, (), steps=2).model.layers
    layers = f"model.layers={sum(plan.layers) or min(max(3, plan.stages + 1), most)}"
    batch = f"training.global_batch={plan.batch_unit * micro_batches}"
    sequence = f"training.sequence={math.lcm(8, plan.tp * (2 * plan.cp if plan.cp > 1 else 1))}"
    return verification_run(layout, model, (batch, sequence, layers, *overrides), steps=2)


def verdict(pool: Pool, run: Run) -> dict[str, Any]:
    result = pool.run("cuboid.verification.compare:verify_rank", (run,), ranks=run.layout.world_size)[0]
    assert isinstance(result, dict)
    return result


def assert_equal(pool: Pool, run: Run) -> None:
    result = verdict(pool, run)
    assert result["passed"], result
    assert not result["unforeseen"], result["unforeseen"]


def unequal_at_the_start(rank: int, run: Run) -> list[str]:
    """Parameters that a rank begins with otherwise than as its part of the whole, by recipe."""
    engine = build_engine(run, rank, CPU, draw=False)
    unequal = []
    for recipe in RECIPES:
        model = dataclasses.replace(run.model, initialization=recipe)
        draw_weights(dataclasses.replace(engine, run=dataclasses.replace(run, model=model)))
        whole = Transformer(model)
        initialize(model, whole, run.training.seed)
        expected = dict(whole.named_parameters())
        for optimizer_shard in (
            optimizer_shard for unit in engine.units for optimizer_shard in unit.optimizer_shards()
        ):
            cut, local = optimizer_shard.part.slice, torch.zeros(optimizer_shard.part.shape)
            real = cut.stop - cut.start
            local.narrow(cut.dimension, 0, real).copy_(
                expected[optimizer_shard.part.name].detach().narrow(cut.dimension, cut.start, real)
            )
            if not torch.equal(optimizer_shard.master, local.flatten()[optimizer_shard.start : optimizer_shard.stop]):
                unequal.append(f"{recipe}: {optimizer_shard.part.name}")
    return unequal


def odd_moments(rank: int, run: Run) -> int:
    """How many of a rank's moments begin at a place that is no multiple of 16 bytes."""
    optimizer = Optimizer(build_engine(run, rank, CPU), run.optimizer)
    moments = [
        moment
        for optimizer_shard in optimizer.optimizer_shards
        for moment in optimizer.state_of(optimizer_shard).values()
    ]
    assert any((optimizer_shard.stop - optimizer_shard.start) % 16 for optimizer_shard in optimizer.optimizer_shards)
    return sum(moment.data_ptr() % 16 > 0 for moment in moments)


def most_on_their_way(rank: int, run: Run) -> int:
    """Of how many segments gradients are being summed at once, at most, in one step."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    segments = [segment for stage in engine.pipeline.stages.values() for segment in stage.segments]
    seen = []
    for segment in segments:

        def collect(plain: Callable[[], None] = segment.collect) -> None:
            plain()
            seen.append(sum(any(unit._gradients._reducing for unit in each.units) for each in segments))

        segment.collect = collect  # type: ignore[method-assign]
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    train_step(engine, optimizer, batches, 1e-3)
    return max(seen)


def held_bytes(rank: int, run: Run) -> dict[str, int]:
    """What a rank holds between steps: parameters, gradients, master weights, optimizer state."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    train_step(engine, optimizer, batches, 1e-3)
    total = {"parameters": 0, "gradients": 0, "master": 0}
    for unit in engine.units:
        for kind, count in unit.held_bytes().items():
            total[kind] += count
    return {**total, "optimizer": optimizer.state_bytes()}


def losses(rank: int, run: Run) -> list[float]:
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    result = []
    for step in range(run.training.steps):
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, CPU)
        result.append(train_step(engine, optimizer, batches, run.learning_rate.peak).loss)
    return result


def losses_and_evaluation(rank: int, run: Run) -> list[float]:
    """The losses of steps, and that of the first batch before and after them."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    source, replica = make_source(run), engine.groups.coordinates.dp
    first = [micro_batches(source, run, 0, replica, CPU)]
    result = [evaluate(engine, first)]
    for step in range(run.training.steps):
        batches = micro_batches(source, run, step, replica, CPU)
        result.append(train_step(engine, optimizer, batches, run.learning_rate.peak).loss)
    return [loss for loss in (*result, evaluate(engine, first)) if loss is not None]


def traced(rank: int, run: Run) -> tuple[list[float], int]:
    """As the compiler traces blocks, run operation by operation: `losses_and_evaluation`, and in how many places it
    stopped within blocks that have no experts."""
    from torch._dynamo.utils import counters  # slow to import, and few tests compile

    counters.clear()
    torch.compiler.reset()  # the ranks of a pool stay, and a function is compiled for a few models only
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        found = losses_and_evaluation(rank, run)
    return found, sum("MoE.forward" not in reason for reason in counters["graph_break"])


def traced_split(rank: int, run: Run) -> tuple[list[float], set[str]]:
    """As the compiler traces blocks, run operation by operation: the losses, and the segments whose weight gradients
    waited."""
    waited: set[str] = set()
    plain = Deferral.postpone

    def postpone(deferral: Deferral, work: Callable[[], None]) -> None:
        assert isinstance(deferral.owner, Segment)
        waited.add(deferral.owner.name)
        plain(deferral, work)

    try:
        Deferral.postpone = postpone  # type: ignore[method-assign]
        torch.compiler.reset()
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            return losses(rank, run), waited
    finally:
        Deferral.postpone = plain  # type: ignore[method-assign]


def poisoned_step(rank: int, run: Run) -> tuple[bool, bool]:
    """One rank's weights are broken; every rank must see it and leave its own weights alone."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    if rank == run.layout.world_size - 1:
        for optimizer_shard in engine.units[-1].optimizer_shards():
            optimizer_shard.master.fill_(float("inf"))
    before = [optimizer_shard.master.clone() for optimizer_shard in optimizer.optimizer_shards]
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    result = train_step(engine, optimizer, batches, 1e-3)
    unchanged = all(
        torch.equal(old, optimizer_shard.master)
        for old, optimizer_shard in zip(before, optimizer.optimizer_shards, strict=True)
    )
    return result.is_finite, unchanged


def unforeseen(rank: int, run: Run) -> list[str]:
    """Where what a rank communicated in any step is not what the planner counts."""
    engine = build_engine(with_output(run, count_communication=True), rank, CPU)
    assert engine.ledger is not None
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    found: list[str] = []
    for step in range(run.training.steps):
        train_step(engine, optimizer, micro_batches(source, run, step, engine.groups.coordinates.dp, CPU), 1e-3)
        found += step_collectives.unforeseen(run, rank, engine.ledger.take())
    return found


def unledgered(rank: int, run: Run) -> bool:
    engine = build_engine(run, rank, CPU)
    return engine.ledger is None and engine.groups.data.ledger is None


def unit_layout(rank: int, run: Run) -> dict[str, tuple[int, list[tuple[str, tuple[int, ...]]]]]:
    """Unit -> how often a micro-batch uses it, and its parameters in the order of its buffer."""
    engine = build_engine(run, rank, CPU)
    return {unit.name: (unit.uses, [(part.name, part.full_shape) for part in unit.parts]) for unit in engine.units}


def timed_actions(rank: int, run: Run) -> list[str]:
    engine = build_engine(run, rank, CPU)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    train_step(engine, Optimizer(engine, run.optimizer), batches, 1e-3)
    timing = engine.pipeline.timing
    assert all(earlier.end <= later.start for earlier, later in pairwise(timing))
    assert all(timed.start <= timed.ready <= timed.end for timed in timing)
    return [str(timed.action) for timed in timing]


def with_output(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, output=dataclasses.replace(run.output, **changes))


def kept_bytes(rank: int, run: Run, unseen: bool = False) -> int:
    """What one micro-batch keeps between its forward and its backward pass, parameters not counted. `unseen`: also what
    selective recomputation keeps, which autograd does not see."""
    engine = build_engine(run, rank, CPU)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    own = {tensor.untyped_storage().data_ptr() for unit in engine.units for tensor in unit.parameters.values()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    share = engine.batches.of(batches[0])
    x = share.tokens
    before = {id(tensor) for tensor in _tensors()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for stage in engine.pipeline.stages.values():
            x = stage.forward(x, share)
    for tensor in _tensors() if unseen else ():
        if id(tensor) not in before:
            keep(tensor)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def _tensors() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def first_activation(rank: int, run: Run) -> float:
    """Of the first step, with an evaluation before it, which is no part of it."""
    engine = build_engine(run, rank, CPU)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    evaluate(engine, [batches])
    return train_step(engine, Optimizer(engine, run.optimizer), batches, 1e-3).activation


def layer_norms(rank: int, run: Run) -> tuple[list[dict[str, list[float]]], list[float]]:
    """By layer after each step, and the norm of each step's whole gradient."""
    engine = build_engine(run, rank, CPU)
    optimizer, norms, source = Optimizer(engine, run.optimizer), LayerNorms(engine), make_source(run)
    found, whole = [], []
    for step in range(run.training.steps):
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, CPU)
        result = start_step(engine, optimizer, batches, 1e-3, norms=norms).result()
        assert result.layers is not None
        found.append(result.layers)
        whole.append(result.gradient_norm)
    return found, whole
