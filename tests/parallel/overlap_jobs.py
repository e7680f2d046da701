"""What a rank starts in which order, as torch's own profiler saw it on real ranks."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel import expert
from cuboid.parallel.parallelize import build_engine
from cuboid.parallel.pipeline import DualPipePair
from cuboid.spec.run import Run
from cuboid.telemetry.profiler_regions import REGIONS
from cuboid.training.cuda_graphs import CapturedPasses
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import compute_gradients, run_passes, train_step

CPU = torch.device("cpu")


def started(rank: int, run: Run, names: tuple[str, ...]) -> list[str]:
    """The regions, operations and collectives of a step whose names begin with one of these, in order of their start.
    It is the second step: what is compiled or connected in the first is not in the way."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    source, replica = make_source(run), engine.groups.coordinates.dp
    train_step(engine, optimizer, micro_batches(source, run, 0, replica, CPU), 1e-3)
    REGIONS.begin()
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            train_step(engine, optimizer, micro_batches(source, run, 1, replica, CPU), 1e-3)
    finally:
        REGIONS.end()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(names)]


def decided(rank: int, run: Run, wishes: tuple[bool, ...]) -> bool:
    engine = build_engine(run, rank, CPU)
    passes = CapturedPasses(engine, partial(run_passes, engine), Optimizer(engine, run.optimizer), always=False)
    return passes._everywhere(wishes[rank])


def settled(rank: int, run: Run) -> tuple[bool, bool]:
    """Whether parameters are on their way after a step, and after what comes before a graph."""
    engine = build_engine(run, rank, CPU)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU)
    train_step(engine, Optimizer(engine, run.optimizer), batches, 1e-3)
    before = any(unit._gathering is not None for unit in engine.units)
    for unit in engine.units:
        unit.settle_gather()
    return before, any(unit._gathering is not None for unit in engine.units)


def pair_log(rank: int, run: Run) -> list[list[tuple[str, str]]]:
    """Of each pair of passes that ran together in one step: which of them issued an all-to-all or waited, in order."""
    logs: list[list[tuple[str, str]]] = []
    real_run, real_start, real_wait = DualPipePair.run, expert.start_all_to_all, expert._Trip.wait

    together = False

    def note(what: str) -> None:
        if together:
            helps = threading.current_thread().name == "overlapped backward"
            logs[-1].append(("backward" if helps else "forward", what))

    def paired(self: DualPipePair, *arguments: Any) -> None:
        nonlocal together
        logs.append([])
        together = True
        real_run(self, *arguments)
        together = False

    def start(*arguments: Any) -> Any:
        note("issue")
        return real_start(*arguments)

    def wait(self: Any, pending: Any) -> Any:
        result = real_wait(self, pending)
        note("waited")
        return result

    DualPipePair.run, expert.start_all_to_all, expert._Trip.wait = paired, start, wait  # type: ignore
    try:
        engine = build_engine(run, rank, CPU)
        compute_gradients(engine, micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, CPU))
    finally:
        DualPipePair.run, expert.start_all_to_all, expert._Trip.wait = real_run, real_start, real_wait  # type: ignore
    return logs
