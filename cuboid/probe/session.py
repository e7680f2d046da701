"""What every rank of a probe does: kernels, steps and collectives in turn, all ranks at once, within a given time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.device import choose_device
from cuboid.parallel.parallelize import build_engine
from cuboid.probe.fit import cases
from cuboid.probe.kernels import LARGEST, Kernel, Timing, kernels, timed, trained
from cuboid.probe.links import circles, time_circle
from cuboid.probe.samples import Sample, merged, spread
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import apply_update, compute_gradients

KERNELS, STEPS = 0.4, 0.25
"""Fractions of the time; collectives have the rest."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank of the probe runs, and how long it has."""

    rank: int
    local: int
    """Ranks of each node."""
    nodes: int
    seconds: float
    device: str

    @property
    def world(self) -> int:
        return self.local * self.nodes


@dataclass(frozen=True)
class Facts:
    """What a device says of itself."""

    name: str
    memory: float
    """Bytes there are for one rank."""
    host_memory: float
    """Bytes of the host's own memory."""


def measure(place: RankPlace, tell: Callable[[str], None]) -> list[Sample]:
    """Returns all samples on rank 0, none elsewhere. `tell`: hears what is being timed."""
    device = choose_device(place.device, place.rank % place.local)
    control = dist.new_group(backend="gloo") if place.world > 1 else None

    def agree(value: float) -> float:
        """The largest of all ranks."""
        if control is None:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=control)
        return float(shared)

    found = _kernels(place, device, agree, tell)
    if device.type == "cpu":
        found += _steps(place, agree, tell)
    if place.world > 1:
        found += _links(place, device, agree, tell)
    if control is None:
        return spread(merged(found))
    everything: list[list[Sample]] | None = [[] for _ in range(place.world)] if place.rank == 0 else None
    dist.gather_object(found, everything, group=control)
    return spread(merged(sample for part in everything or () for sample in part))


def _kernels(
    place: RankPlace, device: torch.device, agree: Callable[[float], float], tell: Callable[[str], None]
) -> list[Sample]:
    made = list(kernels(device))
    each = KERNELS * place.seconds / (len(made) + 2)
    largest = [kernel for kernel in made if kernel.kind == "matmul" and kernel.precision == trained(device)][LARGEST]
    memory = next(kernel for kernel in made if kernel.kind == "memory")
    found = []
    for kernel in (largest, memory):
        tell(f"{_words(kernel)}, one rank alone")
        if place.rank == 0:
            found += _samples(
                kernel.kind, kernel.size, timed(kernel.prepare(), each, device), kernel.precision, "alone"
            )
        agree(0.0)
    for kernel in made:
        tell(_words(kernel))
        action = kernel.prepare()
        agree(0.0)  # all at once, because they share cores, caches and memory
        found += _samples(kernel.kind, kernel.size, timed(action, each, device), kernel.precision)
    return found


def _samples(kind: str, size: tuple[int, ...], timing: Timing, precision: str, way: str = "together") -> list[Sample]:
    return [
        Sample(kind, size, timing.windows, precision, way=way),
        Sample("core_fraction", (), timing.core_fractions, way=way),
    ]


def _words(kernel: Kernel) -> str:
    return f"{kernel.kind.replace('_', ' ')} {'×'.join(map(str, kernel.size))} {kernel.precision}".rstrip()


def _steps(place: RankPlace, agree: Callable[[float], float], tell: Callable[[str], None]) -> list[Sample]:
    runs = cases()
    each = STEPS * place.seconds / (2 * len(runs))
    found = []
    for number, run in enumerate(runs):
        tell(f"a step of {run.model.parameters / 1e6:.1f}M parameters")
        actions = step_actions(run)
        for kind, action in zip(("gradients", "update"), actions, strict=True):
            agree(0.0)
            found += _samples(kind, (number,), timed(action, each, torch.device("cpu")), "float32")
    return found


def _links(
    place: RankPlace, device: torch.device, agree: Callable[[float], float], tell: Callable[[str], None]
) -> list[Sample]:
    made = list(circles(place.rank, place.local, place.nodes, device))
    each = (1 - KERNELS - STEPS) * place.seconds / sum(len(circle.kinds) for circle in made)
    found: list[Sample] = []
    for circle in made:
        where = "one node" if circle.nodes == 1 else f"{circle.nodes} nodes"
        for kind in circle.kinds:
            tell(f"{kind.replace('_', '-')} of {circle.ranks} ranks on {where}")
            found += time_circle(circle, kind, each, device, agree)
    return found


def facts(device: str) -> Facts:
    """Of this host's first device."""
    import os

    chosen = choose_device(device, 0)
    host_memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if chosen.type == "cuda":
        properties = torch.cuda.get_device_properties(chosen)
        return Facts(properties.name, float(properties.total_memory), host_memory)
    return Facts("cpu", host_memory, host_memory)


def step_actions(run: Run) -> tuple[Callable[[], object], Callable[[], object]]:
    """The gradients of one batch, and the update with them."""
    device = torch.device("cpu")
    engine = build_engine(run, 0, device)
    optimizer = Optimizer(engine, run.optimizer)
    batches = micro_batches(make_source(run), run, 0, 0, device)
    pending = compute_gradients(engine, batches)
    return lambda: compute_gradients(engine, batches), lambda: apply_update(engine, optimizer, pending, 1e-5)
