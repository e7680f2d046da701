"""Keep a rank on the cores near its GPU, where the system says which: those of the GPU's NUMA node.

Memory needs no call of its own: Linux takes a page from the node of the core that first writes to it, and all threads
of the rank run on this node. Who has narrowed the rank's cores already (Slurm, taskset, numactl) has the say."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from cuboid.resilience.diagnosis import spans

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
