"""Ranks that stand still in ways that really happen, each in a process of its own under a real watchdog."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cuboid.launch.pool import follow_parent
from cuboid.resilience.hang_dumps import offer_record, offer_stack
from cuboid.telemetry.heartbeat import DEVICE_LEFT, HEARTBEAT


def begin(rank: int, ranks: int, folder: str, job: str, run_folder: str) -> None:
    """A rank process: join the others over gloo, then `job`."""
    follow_parent()
    os.environ["CUBOID_TEST_FOLDER"] = run_folder
    torch.set_num_threads(1)
    offer_stack(folder, rank)
    HEARTBEAT.open(folder, rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)  # type: ignore[attr-defined]
    with HEARTBEAT.everybody("world", ranks).collective("join"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    globals()[job](rank, ranks)


def opposite_order(rank: int, ranks: int) -> None:
    """Two groups of the same ranks, whose collectives even and odd ranks begin in opposite order."""
    world = tuple(range(ranks))
    pairs = [(HEARTBEAT.track(name, world), dist.new_group(list(world))) for name in ("tp", "data")]
    HEARTBEAT.enter("step", 1)
    HEARTBEAT.do("forward")
    for track, group in pairs if rank % 2 else reversed(pairs):
        with track.collective("all-reduce"):
            dist.all_reduce(torch.ones(1), group=group)


def different_kinds(rank: int, ranks: int) -> None:
    """One rank sends where the others all-reduce: as when a branch depends on the rank."""
    track = HEARTBEAT.everybody()
    if rank == 1:
        with track.collective("all-gather"):
            dist.recv(torch.ones(1), 0, tag=7)
    with track.collective("all-reduce"):
        dist.all_reduce(torch.ones(1))


def missing_in_set_up(rank: int, ranks: int) -> None:
    """One rank never makes a group that all make."""
    if rank == 1:
        time.sleep(600)
    with HEARTBEAT.everybody().collective("new group"):
        dist.barrier()


def busy_for_long(rank: int, ranks: int) -> None:
    """One rank computes for several times the limit while the others wait for it; then all continue to the end."""
    HEARTBEAT.enter("step", 1)
    HEARTBEAT.do("forward")
    until = time.monotonic() + 6
    while rank == 1 and time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)
    with HEARTBEAT.everybody().collective("all-reduce"):
        dist.all_reduce(torch.ones(1))
    Path(HEARTBEAT.folder or "", f"done-{rank}").touch()


def compile_elsewhere(rank: int, ranks: int) -> None:
    """One rank sleeps while a process it has started computes, as PyTorch's compiler does."""
    HEARTBEAT.enter("step", 1)
    HEARTBEAT.do("forward")
    if rank == 1:
        os.system("timeout 6 sh -c 'while :; do :; done'")
    with HEARTBEAT.everybody().collective("all-reduce"):
        dist.all_reduce(torch.ones(1))
    Path(HEARTBEAT.folder or "", f"done-{rank}").touch()


ENTRIES = [
    {"state": "completed", "is_p2p": False, "collective_seq_id": 6, "profiling_name": "nccl:all_reduce"},
    {"state": "scheduled", "is_p2p": False, "collective_seq_id": 7, "profiling_name": "nccl:all_gather"},
    {"state": "scheduled", "is_p2p": True, "p2p_seq_id": 1, "profiling_name": "nccl:send 0->1"},
]


def record_flight(rank: int, stem: str, prefix: str) -> None:
    """What PyTorch does beside NCCL, which cannot run here: a pipe, and a record when something is written to it."""
    pipe = f"{stem}{rank}.pipe"
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    while not os.read(handle, 128):
        time.sleep(0.1)
    entries = [{**entry, "process_group": ("0", "default_pg")} for entry in ENTRIES]
    record = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]", "desc": "default_pg"}}, "entries": entries}
    Path(f"{prefix}{rank}").write_bytes(pickle.dumps(record, protocol=2))


def hang_on_the_device(rank: int, ranks: int) -> None:
    """Hosts that wait for devices whose kernels never end; they have the variables that a rank with a GPU sets."""
    offer_record(os.environ["CUBOID_TEST_FOLDER"], HEARTBEAT.folder, torch.__version__)
    names = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE")
    threading.Thread(target=record_flight, args=(rank, *(os.environ[name] for name in names)), daemon=True).start()
    HEARTBEAT.enter("step", 1)
    HEARTBEAT.words[DEVICE_LEFT] = 5
    HEARTBEAT.wait("device")
    threading.Event().wait()
