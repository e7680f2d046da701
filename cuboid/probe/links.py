"""Collectives and messages by size and by group, as the engine makes them, timed on all groups of a kind at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.collectives import (
    all_to_all,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_shift,
)
from cuboid.parallel.groups import Group
from cuboid.parallel.shm_collectives import connect
from cuboid.probe.kernels import WINDOWS, synchronize
from cuboid.probe.samples import Sample

CPU_SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
GPU_SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20)
ENOUGH = 3
"""Sizes from which a latency and a bandwidth can be told apart."""
MOST = 12
"""Calls in a window."""


@dataclass(frozen=True)
class Circle:
    """Ranks that communicate, this one among them; None: this rank waits meanwhile."""

    group: Group | None
    ranks: int
    nodes: int
    way: str
    kinds: tuple[str, ...]


ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")


def circles(rank: int, local: int, nodes: int, device: torch.device) -> Iterator[Circle]:
    """Inside a node: pairs and all; across: 2, 4, … and all nodes, whole; and ranks that face one another."""
    world = local * nodes

    def make(members: list[list[int]], ways: str, kinds: tuple[str, ...], across: int) -> Circle:
        mine: Group | None = None
        for ranks in members:
            handle = dist.new_group(ranks)
            if rank in ranks:
                mine = Group(tuple(ranks), ranks.index(rank), handle)
        if mine is not None and mine.handle is not None and device.type == "cpu" and across == 1:
            mine = Group(mine.ranks, mine.index, mine.handle, connect(mine.handle, mine.index, mine.size))
        return Circle(mine, len(members[0]), across, ways, kinds)

    sizes = sorted({2, local} if local >= 2 and local % 2 == 0 else ({local} if local > 1 else set()))
    for size in sizes:
        yield make([list(range(start, start + size)) for start in range(0, world, size)], "together", ALL, 1)
    spans = {nodes, *(2**power for power in range(1, 20) if nodes % 2**power == 0)} - {1}
    for span in sorted(spans):
        wide = span * local
        yield make([list(range(start, start + wide)) for start in range(0, world, wide)], "together", ALL[:4], span)
    if nodes > 1:
        facing = [list(range(index, world, local)) for index in range(local)]
        yield make(facing, "facing", ("all_to_all", "shift"), nodes)
        yield make(facing[:1], "alone", ("shift",), nodes)


def calls(kind: str, size: int, group: Group, device: torch.device) -> Callable[[], object]:
    """A collective in which `size` bytes take part: what is summed or spread, or what is gathered in the end."""
    whole = torch.zeros(max(size // 4 // group.size, 1) * group.size, device=device)
    part = whole[: whole.numel() // group.size]
    made: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: start_all_reduce(whole, group).wait(),
        "all_gather": lambda: start_all_gather(part, group).wait(),
        "reduce_scatter": lambda: start_reduce_scatter(whole, group).wait(),
        "all_to_all": lambda: all_to_all(whole, group),
        "shift": lambda: start_shift(whole, group).wait(),
    }
    return made[kind]


def time_circle(
    circle: Circle, kind: str, seconds: float, device: torch.device, agree: Callable[[float], float]
) -> Iterator[Sample]:
    """Size after size, three at least, until `seconds` are over; all ranks stop together: they agree on every time."""
    spent = 0.0
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    for number, size in enumerate(sizes):
        action = calls(kind, size, circle.group, device) if circle.group else lambda: None
        synchronize(device)
        if not number:
            action()  # the first call of a group makes its connections
        agree(0.0)  # so that nobody's first call waits for who is still busy with the size before
        start = time.perf_counter()
        action()
        synchronize(device)
        once = agree(time.perf_counter() - start)
        left = max(seconds - spent, 0.0) / (len(sizes) - number)
        count = max(1, min(MOST, int(left / WINDOWS / max(once, 1e-6))))
        windows = []
        for _ in range(WINDOWS):
            start = time.perf_counter()
            for _ in range(count):
                action()
            synchronize(device)
            windows.append((time.perf_counter() - start) / count)
            if once * count > left:  # one window is all there is time for
                break
        spent += agree(once + sum(windows) * count)
        if circle.group:
            yield Sample(kind, (size,), tuple(windows), "", circle.ranks, circle.nodes, circle.way)
        if number + 1 >= ENOUGH and spent + 4 * once > seconds:
            return
