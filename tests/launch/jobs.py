"""What the tests of the pool let its ranks do; they are found by name, as `tests.launch.jobs:function`."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cuboid.errors import UserError
from cuboid.launch.backend import SHARED_GPU, count_cards, set_defaults
from cuboid.launch.rank import Binding, bind_to
from cuboid.resilience.faults import VARIABLE, arm
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.verification.compare import verify_rank


def describe(rank: int, word: str) -> tuple[int, str, bool]:
    return rank, word, dist.is_initialized()


def process_id(rank: int) -> int:
    return os.getpid()


def sum_of_ranks(rank: int) -> tuple[float, int, int]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), dist.get_world_size()


def around_the_ring(rank: int) -> int:
    """Each rank passes its number on and returns the one it was given."""
    ranks = dist.get_world_size()
    received = torch.zeros(1, dtype=torch.int64)
    request = dist.isend(torch.tensor([rank]), (rank + 1) % ranks)
    dist.recv(received, (rank - 1) % ranks)
    request.wait()
    return int(received.item())


def fail_on(rank: int, failing: int) -> None:
    """One rank fails while the others wait for it."""
    if rank == failing:
        raise ValueError(f"rank {rank} has a reason")
    dist.barrier()


def refuse_on(rank: int, refusing: int) -> None:
    if rank == refusing:
        raise UserError("model.vocab=3 is too small; use vocab=4 or more")
    dist.barrier()


def die_on(rank: int, dying: int) -> None:
    if rank == dying:
        os._exit(3)
    dist.barrier()


def sleep_on(rank: int, sleeping: int) -> int:
    if rank == sleeping:
        time.sleep(600)
    return rank


def fail_while_others_sleep(rank: int, failing: int) -> None:
    """Nothing tells the others: they are in no collective."""
    if rank == failing:
        raise ValueError(f"rank {rank} has a reason")
    time.sleep(600)


def unsendable(rank: int) -> object:
    return lambda: rank


def count_aloud(rank: int, say: Callable[[object], None], count: int) -> int:
    for number in range(count):
        say((rank, number))
    return count


def cards_of(rank: int, path: str, cards: list[str]) -> tuple[int, int]:
    """What ranks with these cards find; an empty name is none."""
    return count_cards(dist.FileStore(path, len(cards)), cards[rank], len(cards))  # type: ignore[attr-defined]


def environment_after_defaults(rank: int, chosen: dict[str, str]) -> dict[str, str]:
    wanted = {"NCCL_HOSTID": f"host-{rank}", **SHARED_GPU}
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update(chosen)
    set_defaults(wanted)
    found = {name: os.environ.pop(name) for name in wanted}
    os.environ.update({name: value for name, value in before.items() if value is not None})
    return found


def bind(rank: int, root: str, address: str) -> tuple[Binding | None, list[set[int]]]:
    """Bind this process, look where its threads may run, and undo it for the next job."""
    before, over = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        binding = bind_to(address, Path(root))
        tasks = [int(task) for task in os.listdir("/proc/self/task")]
        cores = [os.sched_getaffinity(task) for task in tasks]
    finally:
        over.set()
        thread.join()
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # a thread of a library may end meanwhile
            os.sched_setaffinity(task, before)
    return binding, cores


def verify_and_hang(rank: int, run: Run, faults: str) -> dict[str, Any] | None:
    """A proof in which what `CUBOID_FAULT` would ask for strikes: its environment is that of another test."""
    os.environ[VARIABLE] = faults
    arm(HEARTBEAT, rank, HEARTBEAT.folder or "")
    return verify_rank(rank, run)
