"""What a rank process of a training does: choose its device, join the others, train."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cuboid.checkpoint.terms import FENCE
from cuboid.console import say
from cuboid.errors import UserError
from cuboid.generate.samples import Sampler
from cuboid.launch.backend import Joined, Wanted, join_world
from cuboid.launch.capacity import allow_many_files
from cuboid.launch.islands import site_of
from cuboid.launch.oom import told_when_short
from cuboid.launch.place import Place, find_place
from cuboid.launch.pool import follow_parent
from cuboid.launch.rendezvous import reach_store
from cuboid.launch.watched import attempt, show, watched_by_the_first
from cuboid.parallel.device import choose_device
from cuboid.resilience.diagnosis import spans
from cuboid.resilience.faults import arm
from cuboid.resilience.hang_dumps import offer_record
from cuboid.resilience.preemption import Listener
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.run_folder import BACKEND, require_folder
from cuboid.training.trainer import Outcome, train

# Keep a rank on the cores near its GPU, where the system says which: those of the GPU's NUMA node.
#
# Memory needs no call of its own: Linux takes a page from the node of the core that first writes to it, and all threads
# of the rank run on this node. Who has narrowed the rank's cores already (Slurm, taskset, numactl) has the say.


ROOT = Path("/")


@dataclass(frozen=True)
class Binding:
    node: int
    cores: tuple[int, ...]

    @property
    def sentence(self) -> str:
        count = f"{len(self.cores)} cores" if len(self.cores) > 1 else "1 core"
        return f"each rank runs on the cores near its GPU: rank 0 on {count} of NUMA node {self.node}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cores": spans(self.cores)}


def bind_near(device: torch.device, mode: str, root: Path = ROOT) -> Binding | None:
    """None: it stays where it is. `mode`: as `training.bind` has it."""
    if mode == "off" or device.type != "cuda":
        return None
    properties = cast(Any, torch.cuda.get_device_properties(device))
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return bind_to(address, root)


def bind_to(address: str, root: Path = ROOT) -> Binding | None:
    """To the cores near the PCI device with this address. `root`: where `sys` and `proc` are found."""
    card = root / "sys/bus/pci/devices" / address
    try:
        node, near = int((card / "numa_node").read_text()), parse_cores((card / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    own = os.sched_getaffinity(0)
    cores = near & own
    # -1: the system has one node, or does not say. Nothing to gain where all cores are near.
    if node < 0 or not cores or cores == own or own != _given(root):
        return None
    for task in os.listdir("/proc/self/task"):  # threads that run already; later ones inherit it
        with suppress(OSError):
            os.sched_setaffinity(int(task), cores)
    return Binding(node, tuple(sorted(cores)))


def _given(root: Path) -> set[int]:
    """The cores a process has here that nobody has bound: all that are online, within its container or job."""
    cores = parse_cores((root / "sys/devices/system/cpu/online").read_text())
    with suppress(OSError, ValueError, IndexError):
        group = (root / "proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2].lstrip("/")
        within = parse_cores((root / "sys/fs/cgroup" / group / "cpuset.cpus.effective").read_text())
        cores = cores & within if within else cores
    return cores


def parse_cores(text: str) -> set[int]:
    """
    >>> sorted(parse_cores("0-2,5"))
    [0, 1, 2, 5]
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if first else set()
    return found


LINGER = 1.0
"""Seconds a failing rank stays after its report, so that one killed without a word, for which it fails, is missed
first."""


def store_of(place: Place) -> Any:
    """Where the ranks meet: at the supervisor's store, at torchrun's, or at the master's."""
    if place.attempt:
        return reach_store(place.master_address, place.master_port, place.attempt)
    # torchrun's agent already listens there; else rank 0 does.
    serves = place.rank == 0 and not os.environ.get("TORCHELASTIC_RUN_ID")
    if serves:
        allow_many_files()
    store = TCPStore(place.master_address, place.master_port, place.world_size, serves, wait_for_workers=False)
    return PrefixStore(attempt(), store)


def join(place: Place, device: torch.device, wanted: Wanted) -> Joined:
    return join_world(store_of(place), place.rank, place.world_size, device, wanted)


def _tell(run: Run, joined: Joined, binding: Binding | None, quiet: bool) -> None:
    """What carries the collectives and where ranks run, in the first lines and for `--json`."""
    if not quiet:
        say(joined.sentence)
        if binding is not None:
            say(binding.sentence)
    (Path(run.output.folder) / BACKEND).write_text(
        json.dumps({**joined.as_json(), "bound": binding and binding.as_json()})
    )


def what_went_wrong(error: Exception) -> str:
    """In one line: torch writes many, of which the first says it and the last ones give advice."""
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    said = lines[0]
    for line in lines[1:]:
        if not said.endswith(":"):
            break
        said += f" {line}"
    return said


def run_rank(run: Run, signals: Listener, quiet: bool = False, place: Place | None = None) -> Outcome:
    """A failure is also written into the run folder, under the rank's number: what went wrong in its first line."""
    place = place or find_place(os.environ) or Place(0, 1, 0, 1, "127.0.0.1", 0)
    try:
        arm(HEARTBEAT, place.rank, run.output.folder)
        FENCE.set(run.output.folder, place.term)
        torch.set_num_threads(run.training.threads_per_rank)
        if run.training.deterministic:  # cuBLAS reads this when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = choose_device(run.training.device, place.local_rank)
        binding = bind_near(device, run.training.bind)  # before pinned memory and threads are made
        if device.type == "cuda":
            offer_record(run.output.folder, HEARTBEAT.folder, torch.__version__)
        joined = Joined(1, gpus=int(device.type == "cuda"))
        if place.world_size > 1:
            with HEARTBEAT.everybody("world", place.world_size).collective("join"):
                joined = join(place, device, run.training.backend)
        ready: Callable[[], None] = partial(require_folder, run) if place.rank == 0 else lambda: None
        ready()
        if place.rank == 0:
            _tell(run, joined, binding, quiet)
        with told_when_short(run, place.rank, device):
            site = site_of(run, os.environ)
            outcome = train(run, place.rank, device, quiet, lambda: signals.asked, Sampler, ready, site)
        if place.world_size > 1:
            if not place.attempt:  # rank 0 may serve the store, from which others read how the last save went
                dist.barrier(device_ids=[device.index] if joined.backend == "nccl" else None)
            dist.destroy_process_group()
        return outcome
    except Exception as error:
        told = as_told(error, run)
        _report(run, place.rank, f"{what_went_wrong(told)}\n\n{traceback.format_exc()}")
        if place.world_size > 1:
            time.sleep(LINGER)
        if told is error:
            raise
        raise told from error


def as_told(error: Exception, run: Run) -> Exception:
    """A file that is missing because the run's folder was removed is no fault of the program."""
    folder = Path(run.output.folder)
    if not isinstance(error, FileNotFoundError) or folder.exists():
        return error
    return UserError(f"output.folder={folder} was removed, or unmounted, while the run trained; use one that stays")


def _report(run: Run, rank: int, text: str) -> None:
    """Into the run's folder. One that was removed is not made anew for it, and a full disk takes nothing: then beside
    the heartbeats, where the supervisor looks too."""
    places = [Path(run.output.folder), *([HEARTBEAT.folder] if HEARTBEAT.folder else [])]
    for place in places:
        path = place / f"failure-{rank:05d}.txt"
        try:
            path.write_text(text)
            return
        except OSError:
            with suppress(OSError):
                path.unlink()


def run_joined_rank(run: Run, signals: Listener, quiet: bool) -> Outcome:
    """A rank that torchrun or Slurm started, or the only one."""
    place = find_place(os.environ)
    with watched_by_the_first(run, place):
        return run_rank(run, signals, quiet, place)


def run_started_rank(
    run: Run, quiet: bool, places: tuple[Place, ...], pids: MutableSequence[int], heartbeats: str
) -> Outcome:
    """A rank that the supervisor of this machine started, and that ends with it. `pids`: where it finds the rank;
    `heartbeats`: the folder in which it sees what the rank does."""
    follow_parent()
    with Listener(run, patience=2.0) as signals:  # the supervisor comes first, if it knows
        own = int(os.environ["LOCAL_RANK"])
        place, pids[own] = places[own], os.getpid()
        # The agent counts its own machine's ranks only; what PyTorch writes for debugging carries these numbers.
        os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size))
        show(heartbeats, place.rank)
        outcome = run_rank(run, signals, quiet, place)
        pids[own] = 0
    return outcome
