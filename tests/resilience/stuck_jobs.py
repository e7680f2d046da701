"""Ranks that stand still in ways that really happen, each in a process of its own under a real watchdog."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cuboid.launch.orphan import follow_parent
from cuboid.resilience.pulse import PULSE
from cuboid.resilience.stacks import offer_stack


def begin(rank: int, ranks: int, folder: str, job: str) -> None:
    """A rank process: join the others over gloo, then `job`."""
    follow_parent()
    torch.set_num_threads(1)
    offer_stack(folder, rank)
    PULSE.open(folder, rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)  # type: ignore[attr-defined]
    with PULSE.everybody("world", ranks).joined("join"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    globals()[job](rank, ranks)


def opposite_order(rank: int, ranks: int) -> None:
    """Two groups of the same ranks, whose collectives even and odd ranks begin in opposite order."""
    world = tuple(range(ranks))
    pairs = [(PULSE.track(name, world), dist.new_group(list(world))) for name in ("tp", "data")]
    PULSE.enter("step", 1)
    PULSE.do("forward")
    for track, group in pairs if rank % 2 else reversed(pairs):
        with track.joined("all-reduce"):
            dist.all_reduce(torch.ones(1), group=group)


def different_kinds(rank: int, ranks: int) -> None:
    """One rank sends where the others all-reduce: as when a branch depends on the rank."""
    track = PULSE.everybody()
    if rank == 1:
        with track.joined("all-gather"):
            dist.recv(torch.ones(1), 0, tag=7)
    with track.joined("all-reduce"):
        dist.all_reduce(torch.ones(1))


def missing_in_set_up(rank: int, ranks: int) -> None:
    """One rank never makes a group that all make."""
    if rank == 1:
        time.sleep(600)
    with PULSE.everybody().joined("new group"):
        dist.barrier()


def busy_for_long(rank: int, ranks: int) -> None:
    """One rank computes for several times the limit while the others wait for it; then all go on to the end."""
    PULSE.enter("step", 1)
    PULSE.do("forward")
    until = time.monotonic() + 9
    while rank == 1 and time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)
    with PULSE.everybody().joined("all-reduce"):
        dist.all_reduce(torch.ones(1))
    Path(PULSE.folder or "", f"done-{rank}").touch()


def compile_elsewhere(rank: int, ranks: int) -> None:
    """One rank sleeps while a process it has started computes, as PyTorch's compiler does."""
    PULSE.enter("step", 1)
    PULSE.do("forward")
    if rank == 1:
        os.system("timeout 9 sh -c 'while :; do :; done'")
    with PULSE.everybody().joined("all-reduce"):
        dist.all_reduce(torch.ones(1))
    Path(PULSE.folder or "", f"done-{rank}").touch()
