"""Which backend carries the collectives of a job: NCCL where ranks have GPUs, gloo on CPUs.

NCCL refuses two ranks on one GPU only where they also look like one host. A `NCCL_HOSTID` of its own for each rank
makes them look like several hosts, which talk through sockets: slower than between GPUs, but the same library, in the
same order, with the same results. The UUIDs of the cards decide whether ranks share a GPU, so a launcher that shows
each rank one card (`srun --gpus-per-task=1`) gets plain NCCL.

What the user has set in NCCL_*, TORCH_NCCL_* or GLOO_* stays as it is: everything here is a default."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from cuboid.errors import UserError
from cuboid.parallel.coordination import remember_store
from cuboid.parallel.shm_collectives import machine_identity

Wanted = Literal["auto", "nccl", "gloo"]
Backend = Literal["nccl", "gloo"]

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
SHARED_GPU: dict[str, str] = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""What NCCL needs to talk between ranks of one GPU: sockets only."""


@dataclass(frozen=True)
class Joined:
    """What the ranks of a job found when they joined."""

    ranks: int
    backend: Backend | None = None
    """None: one rank, which has nobody to talk to."""
    gpus: int = 0
    """Cards that the ranks compute on, all nodes together; 0: they compute on CPUs."""
    hosts: int = 1

    @property
    def gpu_shared(self) -> bool:
        return 0 < self.gpus < self.ranks

    @property
    def sentence(self) -> str:
        """For the first lines of a run."""
        ranks = f"{self.ranks} ranks"
        cards = f"{self.gpus} GPU" + ("" if self.gpus == 1 else "s")
        placed = f"{ranks} share {cards}" if self.gpu_shared else f"{ranks} on {cards}"
        if self.backend is None:
            return "backend: none, one rank" + (" on a GPU" if self.gpus else " on CPUs")
        if not self.gpus:
            return f"backend: gloo, {ranks} on CPUs"
        if self.backend == "gloo":
            return f"backend: gloo, as asked, through host memory: {placed}"
        return f"backend: NCCL over sockets: {placed}" if self.gpu_shared else f"backend: NCCL, {placed}"

    def as_json(self) -> dict[str, Any]:
        """For `--json` and the run's folder."""
        return {**asdict(self), "gpu_shared": self.gpu_shared}


def refuse_backend(wanted: str, device: torch.device, field: str = "training.backend") -> None:
    """Before any process starts, and again on each rank: another node may have no GPU. `field`: as the user has named
    it, `--backend` where it is an option."""
    name = field.rpartition(".")[2]
    if wanted not in ("auto", "nccl", "gloo"):
        raise UserError(f"{field}={wanted} is unknown; use auto, nccl or gloo")
    if wanted == "nccl" and device.type != "cuda":
        raise UserError(f"{field}=nccl needs a GPU for every rank, and a rank has none; use {name}=auto or gloo")
    if wanted != "gloo" and device.type == "cuda" and not dist.is_nccl_available():
        raise UserError(f"{field}={wanted} needs NCCL on GPUs, and this PyTorch has none; use {name}=gloo")


def join_world(
    store: Any,
    rank: int,
    world_size: int,
    device: torch.device,
    wanted: Wanted = "auto",
    timeout: timedelta | None = None,
) -> Joined:
    """Make the process group of all ranks. Every rank calls this with a store that all of them share."""
    refuse_backend(wanted, device)
    card = ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        card = str(cast(Any, torch.cuda.get_device_properties(device)).uuid)
    gpus, hosts = count_cards(dist.PrefixStore("cards", store), card, world_size)  # type: ignore[attr-defined]
    backend: Backend = "nccl" if gpus and wanted != "gloo" else "gloo"
    joined = Joined(world_size, backend, gpus, hosts)
    if backend == "nccl" and joined.gpu_shared:
        set_defaults(SHARED_GPU | {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}"})
        if hosts == 1:
            set_defaults({"NCCL_SOCKET_IFNAME": LOOPBACK})
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    group_store = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, **options)
    remember_store(dist.PrefixStore("coordination", store))  # type: ignore[attr-defined]
    return joined


def set_defaults(values: dict[str, str]) -> None:
    """In this process and those it starts; what the user has set wins."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def count_cards(store: Any, card: str, world_size: int) -> tuple[int, int]:
    """Different GPUs and different hosts of the job. A few calls of the store for each rank, however many there are.
    `card`: the UUID of this rank's GPU; empty: it has none."""
    for kind, name in (("gpus", card), ("hosts", machine_identity())):
        if name and store.add(f"{kind}/{name}", 1) == 1:
            store.add(kind, 1)
    store.add("with a GPU", int(bool(card)))
    if store.add("ranks", 1) == world_size:
        store.set("all", "yes")  # after all of the above, on every rank
    store.wait(["all"])
    with_gpu = store.add("with a GPU", 0)
    if with_gpu not in (0, world_size):
        raise UserError(
            f"training.device: {with_gpu} of {world_size} ranks have a usable GPU and the others none; "
            "give every rank one, or use training.device=cpu"
        )
    return store.add("gpus", 0), store.add("hosts", 0)
