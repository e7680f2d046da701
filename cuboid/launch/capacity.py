"""Whether this machine can start so many ranks: refused in one sentence before the first of them is started.

What a rank takes was measured with `cuboid train` on CPUs: 2 to 32 ranks of a tiny model, layouts of dp, tp and pp. The
numbers are the least that was seen, so that nothing is refused that would have run."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cuboid.errors import UserError
from cuboid.spec.generation import GenerationSpec
from cuboid.spec.run import Run

PROCESS_BYTES = 69 << 20
"""Memory that a rank has to itself (USS): 69 to 72 MiB."""
SLOT_BYTES = 8 << 20
"""What a rank of several adds to the shared memory of its machine's collectives: two slots of 4 MiB."""
TASKS = 8
"""Threads of a rank: 8 with one process group, 17 with three."""
FILES, FILES_PER_RANK = 19, 7
"""Open files of the process that starts ranks: 33 for two of them, 243 for 32. A rank has 22 and 5 for each rank."""
WIDTHS = {"float64": 8, "float32": 4}
"""Bytes of a number; others have two."""
PER_CORE = 16
"""Ranks for each core. So many are a rehearsal, in which each computes for a sixteenth of the time; more are a mistake,
or want `--oversubscribe`."""
GPU_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
ROOT = Path("/")
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Room:
    """What this machine still has."""

    memory: int
    """Bytes that processes may take."""
    tasks: int
    """Processes and threads."""
    files: int
    """Of one process."""
    cores: int
    """That this process may use."""


def room_here(root: Path = ROOT) -> Room:
    """`root`: where `proc` and `sys` are found."""
    groups = [folder for kind in ("memory", "pids", "cpu") for folder in _control_groups(root, kind)]
    memory, tasks, cores = psutil.virtual_memory().available, _tasks_of_user(), len(os.sched_getaffinity(0))
    for folder in groups:
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            # What files keep in memory is given back to who needs it.
            free = _number(folder / limit) - _number(folder / used, 0) + _cached(folder)
            memory = min(memory, max(0, free))
        tasks = min(tasks, _number(folder / "pids.max") - _number(folder / "pids.current", 0))
        cores = min(cores, _cores(folder))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return Room(memory, tasks, UNLIMITED if files == resource.RLIM_INFINITY else files, cores)


def _control_groups(root: Path, kind: str) -> list[Path]:
    """The folders of this process's control groups that may limit it, the outer ones too."""
    found: list[Path] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds and kind not in kinds.split(","):
                continue
            top = root / "sys/fs/cgroup" / (kind if kinds else "")
            own = top / name.lstrip("/")
            # A container sees its own group as the top one, whatever the name says.
            found += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return list(dict.fromkeys(found))


def _number(path: Path, missing: int = UNLIMITED) -> int:
    """`max` and what is not there limit nothing."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return missing


def _cores(folder: Path) -> int:
    """The time of so many that a group may take: a quota in a period, in cpu.max or in two files."""
    quota, period = _number(folder / "cpu.cfs_quota_us", -1), _number(folder / "cpu.cfs_period_us", 0)
    with suppress(OSError, ValueError):
        quota, period = map(int, (folder / "cpu.max").read_text().split())
    return max(1, round(quota / period)) if quota > 0 and period > 0 else UNLIMITED


def _cached(folder: Path) -> int:
    with suppress(OSError, ValueError):
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(facts.get("total_inactive_file") or facts.get("inactive_file") or 0)
    return 0


def _tasks_of_user() -> int:
    """How many more this user may start; the system does not count those of root."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or not os.getuid():
        return UNLIMITED
    used = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                used += process.num_threads()
    return max(0, limit - used)


def allow_many_files() -> None:
    """Every rank connects to who serves the store, for its process groups and again for its checkpoints, and to the
    ranks of its groups: 1,024 open files, a usual limit, are used up by a few hundred ranks. The system's own limit is
    what may be asked for. Processes that are started later have it too."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        with suppress(ValueError, OSError):  # some systems name a limit that they do not give
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def may_use_gpu(device: str) -> bool:
    """Whether a run on this device may find a GPU here; without torch, which takes seconds to import. `cuda` without a
    GPU is refused elsewhere."""
    if device != "auto":
        return device == "cuda"
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path(sign).exists() for sign in GPU_SIGNS)


def state_bytes(run: Run) -> int:
    """The least that weights, gradients and optimizer of all ranks take in host memory."""
    layout, on_gpu = run.layout, may_use_gpu(run.training.device)
    replicas = max(1, layout.dp * layout.cp // layout.ep)
    width = WIDTHS.get(run.training.precision, 2)
    # 16-bit weights come with the other 16 bits of their float32 master; moments are float32 then too.
    wide = max(4, width)
    weights = 0 if on_gpu else wide * (1 if layout.zero >= 3 else replicas)
    gradients = 0 if on_gpu else width * (1 if layout.zero >= 2 else replicas)
    moments = 2 * wide * (1 if layout.zero >= 1 else replicas)
    if run.optimizer.is_own or (on_gpu and not layout.offload):
        moments = 0
    if run.optimizer.average and not on_gpu:
        moments += wide * (1 if layout.zero >= 1 else replicas)
    return run.model.parameters * (weights + gradients + moments)


def check_run(run: Run, ranks: int, oversubscribe: bool = False, called: str = "") -> None:
    """Refuse a training, or a proof, of which `ranks` ranks would start here. `oversubscribe`: try it with less memory
    than it seems to take, and on few cores."""
    held = state_bytes(run) * ranks // run.layout.world_size
    check_ranks(ranks, called or f"layout={run.layout}", held, "weights, gradients and optimizer state", oversubscribe)


def check_generation(spec: GenerationSpec, oversubscribe: bool = False) -> None:
    held = spec.model.parameters * WIDTHS.get(spec.precision, 2) * max(1, spec.layout.dp // spec.layout.ep)
    held = 0 if may_use_gpu(spec.device) else held
    check_ranks(spec.layout.world_size, f"layout={spec.layout}", held, "weights", oversubscribe)


def check_ranks(
    ranks: int, called: str, held: int = 0, holding: str = "", oversubscribe: bool = False, room: Room | None = None
) -> None:
    """`called`: what asks for them, as the user wrote it. `held`: bytes that they hold beside their processes."""
    allow_many_files()
    room = room or room_here()
    each = PROCESS_BYTES + (SLOT_BYTES if ranks > 1 else 0)
    begins = f"{called} starts {ranks} rank{'s' if ranks > 1 else ''} on this machine"
    least = (room.files - FILES) // FILES_PER_RANK
    if ranks > 1 and ranks > least:
        raise UserError(
            f"{begins}, for which one process opens {FILES + FILES_PER_RANK * ranks} files and may open {room.files}; "
            f"use at most {max(1, least)} ranks, more nodes, or a higher limit (ulimit -Hn)"
        )
    least = room.tasks // TASKS
    if ranks > 1 and ranks > least:
        raise UserError(
            f"{begins}, which are {TASKS * ranks} processes and threads, and {max(0, room.tasks)} more may be started; "
            f"use at most {max(1, least)} ranks, more nodes, or a higher limit (ulimit -u, pids.max)"
        )
    if oversubscribe:
        return
    if ranks > PER_CORE * room.cores:
        cores = "1 core" if room.cores == 1 else f"{room.cores} cores"
        raise UserError(
            f"{begins}, which has {cores} for them; use at most {PER_CORE * room.cores} ranks ({PER_CORE} a core), "
            "more nodes, or --oversubscribe to try it all the same"
        )
    if ranks * each + held <= room.memory:
        return
    parts = f"{each / 1e9:.2g} GB for each process" + (f" and {_gigabytes(held)} of {holding}" if held else "")
    fewer = (room.memory - held) // each
    works = f"at most {fewer} ranks, " if 0 < fewer < ranks else "a smaller model, "
    raise UserError(
        f"{begins}, which {'take' if ranks > 1 else 'takes'} at least {_gigabytes(ranks * each + held)} of memory "
        f"({parts}), and {_gigabytes(room.memory)} are free; use {works}more nodes, or --oversubscribe to try it all "
        "the same"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.0f} GB" if size > 1e11 else f"{size / 1e9:.3g} GB"
