"""A job for ranks of the pool: steps of a real pipeline whose stages sleep for known times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.schedule.simulate import StageCosts
from cuboid.spec.run import Run
from cuboid.training.metrics import Metrics
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step

STEPS = 4
COSTS = StageCosts(forward=(0.04, 0.08, 0.04), input_backward=(0.05, 0.1, 0.05), weight_backward=(0.05, 0.1, 0.05))


def _after(act: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same, taking so long in all."""

    def slowed(*arguments: Any) -> Any:
        end = time.perf_counter() + seconds
        result = act(*arguments)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return slowed


def scaled(factor: float) -> StageCosts:
    forward, inputs, weights = (
        tuple(factor * seconds for seconds in part)
        for part in (COSTS.forward, COSTS.input_backward, COSTS.weight_backward)
    )
    return StageCosts(forward=forward, input_backward=inputs, weight_backward=weights)


def slowed_steps(rank: int, run: Run, factor: float) -> None:
    device = torch.device("cpu")
    engine = build_engine(run, rank, device)
    optimizer, source = Optimizer(engine, run.optimizer), make_source(run)
    costs = scaled(factor)
    for index, stage in engine.pipeline.stages.items():
        backward = costs.input_backward[index] + costs.weight_backward[index]
        stage.forward = _after(stage.forward, costs.forward[index])  # type: ignore[method-assign]
        stage.backward = _after(stage.backward, backward)  # type: ignore[method-assign]
    with Metrics(run, rank, quiet=True) as metrics:
        for step in range(STEPS):
            start = time.perf_counter()
            batches = micro_batches(source, run, step, engine.groups.coordinates.dp, device)
            result = train_step(engine, optimizer, batches, 1e-3)
            told = replace(result, learning_rate=1e-3, seconds=time.perf_counter() - start)
            metrics.record(step + 1, told, engine.pipeline.timing)
