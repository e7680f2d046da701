"""Jobs of the tests of precisions."""

from __future__ import annotations

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step
from tests.parallel.cases import CPU

Steps = list[tuple[float, float, float, int]]


def steps(rank: int, run: Run) -> Steps:
    """Loss, gradient norm, loss scale and overflows so far of each step."""
    return _steps(build_engine(run, rank, CPU))


def steps_gathered_wide(rank: int, run: Run) -> Steps:
    """The same with ZeRO 3 that gathers 16 bits."""
    engine = build_engine(run, rank, CPU)
    in_fp8 = [unit for unit in engine.units if unit._fp8 is not None]
    assert len(in_fp8) == run.model.layers
    for unit in in_fp8:
        unit._fp8 = None
    return _steps(engine)


def _steps(engine: Engine) -> Steps:
    run = engine.run
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    seen = []
    for step in range(run.training.steps):
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, CPU)
        result = train_step(engine, optimizer, batches, run.learning_rate.peak)
        seen.append((result.loss, result.gradient_norm, result.loss_scale, result.overflows))
    return seen
