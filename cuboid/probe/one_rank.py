"""One rank of a job of any size, run for real on this machine: real computing, real memory, collectives replaced.

The process group is torch's `fake`, which answers every collective at once, and what would come from other ranks is
this rank's own or random: losses mean nothing, times and bytes do. Experts get as many rows as they would with loads
in balance."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.errors import UserError, up_to
from cuboid.launch.oom import told_when_short
from cuboid.model.batch import MicroBatch
from cuboid.parallel.device import choose_device
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.probe.kernels import routing, synchronize, timed
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.memory import Tally, held, storages
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import compute_gradients

WARM_UP = 3.0
"""Seconds for which a GPU works before its steps are timed."""
ROUTING = 0.4
"""Seconds for which the host's speed is measured, before the steps and after."""


@dataclass(frozen=True)
class RankReport:
    """What one rank of the job took."""

    memory: dict[str, float]
    """Bytes at the fullest moment: parameters, gradients, optimizer, activations (and all that lives for a moment), and
    buffers: what the allocator of a GPU keeps beside, or what a process on a CPU has before it begins."""
    seconds: tuple[float, ...]
    """Of every timed step: gradients and update."""
    routing: float | None
    """Seconds of the probe's small layer with experts, before and after these steps: how fast the host is. None on a
    CPU, which computes while it would launch."""
    device: str


def run_one_rank(run: Run, rank: int, steps: int = 3) -> RankReport:
    """A few steps of this rank, the first to warm up."""
    check_one_rank(run, rank)
    device = choose_device(run.training.device, 0)
    torch.set_num_threads(run.training.threads_per_rank)
    if run.layout.world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.layout.world_size)
    try:
        with told_when_short(run, rank, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what nobody sent is not initialized
            return _measure(run, rank, device, steps)
    finally:
        if run.layout.world_size > 1:
            dist.destroy_process_group()


def check_one_rank(run: Run, rank: int) -> None:
    """Refuse what cannot be run without the others."""
    if not 0 <= rank < run.layout.world_size:
        raise UserError(f"rank={rank} is not in layout={run.layout}; use {up_to(run.layout.world_size - 1, 'rank=')}")


def _measure(run: Run, rank: int, device: torch.device, steps: int) -> RankReport:
    on_gpu = device.type == "cuda"
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    HEARTBEAT.enter("set-up")  # where a rank that runs out of memory says that it was
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, device)
    HEARTBEAT.enter("step", 1)
    _step(engine, optimizer, batches)
    synchronize(device)
    if on_gpu:
        _warm_up(engine, optimizer, batches)
        torch.cuda.reset_peak_memory_stats(device)
    seconds, launches = [], [_routing_seconds(device)] if on_gpu else []
    for _ in range(steps):
        start = time.perf_counter()
        _step(engine, optimizer, batches)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    known = _held(engine, optimizer)
    if on_gpu:
        launches.append(_routing_seconds(device))
        peak = float(torch.cuda.max_memory_allocated(device))
        buffers = float(torch.cuda.max_memory_reserved(device)) - peak
        beside = peak - sum(known.values())
    else:
        tally = Tally(storages(engine.units, optimizer), lambda: sum(held(engine.units, optimizer).values()))
        with tally:
            _step(engine, optimizer, batches)
        beside, buffers = float(tally.beside), float(resident)
        known = {**known, "parameters": tally.peak - beside - known["gradients"] - known["optimizer"]}
    routed = statistics.fmean(launches) if launches else None
    return RankReport({**known, "activations": beside, "buffers": buffers}, tuple(seconds), routed, device.type)


def _routing_seconds(device: torch.device) -> float:
    return statistics.median(timed(routing(device), ROUTING, device).windows)


def _warm_up(engine: Engine, optimizer: Optimizer, batches: list[MicroBatch]) -> None:
    """A cold GPU is faster than it stays."""
    end = time.perf_counter() + WARM_UP
    while time.perf_counter() < end:
        _step(engine, optimizer, batches)
        synchronize(engine.device)


def _step(engine: Engine, optimizer: Optimizer, batches: list[MicroBatch]) -> None:
    """As a training does it, but the update is never default: what was not received is often not a number."""
    compute_gradients(engine, batches)
    one = torch.ones((), device=engine.device)
    optimizer.step(1e-6, one, engine.run.training.gradient_clip, one > 0)


def _held(engine: Engine, optimizer: Optimizer) -> dict[str, float]:
    """As the planner tells kinds apart."""
    kinds = held(engine.units, optimizer)
    return {
        "parameters": float(kinds["parameters"] + kinds["master weights"]),
        "gradients": float(kinds["gradients"]),
        "optimizer": float(kinds["optimizer"]),
    }
