"""Which backend carries the collectives of a job: NCCL where ranks have GPUs, gloo on CPUs.

NCCL refuses two ranks on one GPU only where they also look like one host. A `NCCL_HOSTID` of its own for each rank
makes them look like several hosts, which talk through sockets: slower than between GPUs, but the same library, in the
same order, with the same results. The UUIDs of the cards decide whether ranks share a GPU, so a launcher that shows
each rank one card (`srun --gpus-per-task=1`) gets plain NCCL."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from cuboid.errors import UserError
from cuboid.parallel.coordination import remember_store

Wanted = Literal["auto", "nccl", "gloo"]
Backend = Literal["nccl", "gloo"]

SHARED_GPU: dict[str, str] = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""What NCCL needs to talk between ranks of one GPU: sockets only. The user's own settings win."""


def refuse_backend(wanted: Wanted, device: torch.device) -> None:
    if wanted == "nccl" and device.type != "cuda":
        raise UserError(
            "training.backend=nccl needs a GPU for every rank, and a rank has none; use backend=auto or gloo"
        )


def join_world(
    store: Any,
    rank: int,
    world_size: int,
    device: torch.device,
    wanted: Wanted = "auto",
    timeout: timedelta | None = None,
) -> Backend:
    """Make the process group of all ranks. Every rank calls this with a store that all of them share."""
    refuse_backend(wanted, device)
    backend: Backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        shared = _shares_gpu(dist.PrefixStore("cards", store), device, world_size)  # type: ignore[attr-defined]
        backend = "gloo" if wanted == "gloo" else "nccl"
        if shared and backend == "nccl":
            for name, value in {**SHARED_GPU, "NCCL_HOSTID": f"{socket.gethostname()}-{rank}"}.items():
                os.environ.setdefault(name, value)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    group_store = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, **options)
    remember_store(dist.PrefixStore("coordination", store))  # type: ignore[attr-defined]
    return backend


def _shares_gpu(store: Any, device: torch.device, world_size: int) -> bool:
    """Whether any two ranks of the job have one GPU. A few calls of the store for each rank, however many there are."""
    card = cast(Any, torch.cuda.get_device_properties(device)).uuid
    if store.add(f"ranks of {card}", 1) > 1:
        store.set("shared", "yes")
    if store.add("ranks", 1) == world_size:
        store.set("all", "yes")  # after `shared`, if any rank has set that
    store.wait(["all"])
    return bool(store.check(["shared"]))
