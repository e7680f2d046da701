"""A rank that runs out of memory says in one sentence where, what held it, what it wanted, and what would free it."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cuboid.errors import RankError, UserError
from cuboid.planning.oom_advice import relief
from cuboid.planning.plan import planned_cluster
from cuboid.resilience.replan import cluster_here, resized
from cuboid.spec.ranks import coordinates
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT, read_heartbeat
from cuboid.training.memory import held_here
from cuboid.training.profile import end_history, history_is_recorded, write_snapshot

SIGNS = ("DefaultCPUAllocator", "out of memory", "Unable to allocate", "Cannot allocate memory")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
SIZE = r"([\d.]+) (bytes|[KMGTP]iB)"
GROWS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@contextmanager
def told_when_short(run: Run, rank: int, device: torch.device) -> Iterator[None]:
    """Around all that a rank does."""
    before = 0 if device.type == "cuda" else _process_memory()[0]
    try:
        yield
    except Exception as error:
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        # A run that has been going for some steps may continue from its checkpoint; one that has not never will.
        kind = RankError if read_heartbeat(HEARTBEAT.words).learned["step"].seen else UserError
        raise kind(_sentence(run, rank, device, OutOfMemory.on(device, str(cause), before))) from error
    finally:
        if device.type == "cuda" and run.profile.traces(rank):
            end_history()


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """The lack of memory an exception comes of, if it does: compilers and autograd wrap what they meet."""
    while error is not None:
        told = isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in SIGNS)
        if told or isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None


@dataclass(frozen=True)
class OutOfMemory:
    """Bytes, as they were when there was too little."""

    asked: float | None
    used: float
    """By this process, of what it can have."""
    limit: float
    held: dict[str, float]
    base: float = 0.0
    """Of what is used, what was there before the model."""
    unused: float = 0.0
    """What the allocator has, in blocks that nothing fitted in."""

    @classmethod
    def on(cls, device: torch.device, message: str, before: float) -> OutOfMemory:
        kinds: dict[str, float] = {kind: float(size) for kind, size in held_here().items()}
        if device.type != "cuda":
            asked = _told(rf"tried to allocate {SIZE}|Unable to allocate {SIZE}", message)
            used, limit = _process_memory()
            kinds["other"] = used - sum(kinds.values())  # activations too: nobody counted them
            return cls(asked, used, limit, kinds, before)
        left, whole = torch.cuda.mem_get_info(device)
        free = _told(rf"of which {SIZE} is free", message)
        allocated = _told(rf"{SIZE} is allocated by PyTorch", message)
        unused = _told(rf"{SIZE} is reserved by PyTorch but unallocated", message)
        free = float(left) if free is None else free
        allocated = float(torch.cuda.memory_allocated(device)) if allocated is None else allocated
        unused = unused or 0.0
        kinds |= {"activations": allocated - sum(kinds.values()), "other": whole - free - allocated}
        asked = _told(rf"Tried to allocate {SIZE}", message)
        return cls(asked, allocated, allocated + unused + free, kinds, unused=unused)


def _told(pattern: str, message: str) -> float | None:
    found = re.search(pattern, message)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return float(number) * UNITS[unit]


def _process_memory() -> tuple[float, float]:
    """What this process has, and can have: of its address space where that is limited, else of the machine."""
    pages = [int(count) for count in Path("/proc/self/statm").read_text().split()[:2]]
    space, resident = (count * os.sysconf("SC_PAGE_SIZE") for count in pages)
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY:
        return float(space), float(allowed)
    return float(resident), float(resident + psutil.virtual_memory().available)


def _sentence(run: Run, rank: int, device: torch.device, shortage: OutOfMemory) -> str:
    reading = read_heartbeat(HEARTBEAT.words)
    where = f"step {reading.step}" if reading.phase == "step" else reading.phase
    if reading.stage >= 0:
        where += f" ({reading.activity} of stage {reading.stage}, micro-batch {reading.micro_batch})"
    wanted = "it wanted more" if shortage.asked is None else f"it wanted {_size(shortage.asked)} more"
    left = _size(max(0.0, shortage.limit - shortage.used))
    if shortage.asked is not None and shortage.limit - shortage.used >= shortage.asked:
        left = "less than that"  # some was given back since, or what is left is in small blocks
    kinds = sorted(shortage.held.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {_size(size)}" for name, size in kinds if size >= 2**20)
    parts = [
        f"rank {rank} of {run.layout} ran out of memory in {where}: {wanted} and {left} of "
        f"{_size(shortage.limit)} was left; held: {held}",
        _advice(run, rank, device, shortage),
    ]
    if device.type == "cuda" and history_is_recorded(device):
        parts.append(f"open {write_snapshot(run, rank)} in pytorch.org/memory_viz")
    return "; ".join(parts)


def _advice(run: Run, rank: int, device: torch.device, shortage: OutOfMemory) -> str:
    asked = shortage.asked or 0.0
    if 0 < asked <= shortage.unused and "expandable_segments" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return f"{_size(shortage.unused)} of it lie unused in blocks that are too small: set {GROWS}"
    cluster = planned_cluster(run) or cluster_here(run, on_cpu=device.type == "cpu")
    per_node = max(1, cluster.accelerators_per_node)
    world = run.layout.world_size
    nodes = -(-world // per_node)
    cluster = resized(cluster, nodes, -(-world // nodes))
    stage = coordinates(rank, run.layout).pp
    found = relief(run, cluster, stage, shortage.used + asked, shortage.limit, shortage.base)
    if found is None:
        return "nothing is left to change in its layout: use more ranks, or a smaller model or sequence"
    freed = f"{found.change} in the layout frees {_size(found.freed)} by the planner's memory model"
    if found.enough:
        speed = f"{abs(found.slower):.0%} {'slower' if found.slower >= 0 else 'faster'} by its clock"
        return f"{freed}, which is enough, and is {speed}"
    return f"{freed}, more than any other change of the layout but not enough: use more ranks too"


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.1f} MiB"
