"""Async tensor parallelism: the compiler splits a matmul beside a collective of tokens, and multiplies one part while
the copy engines bring the next from the memory of another tensor rank's GPU.

    gather tokens → matmul          one part of the tokens is multiplied while the next arrives
    matmul → sum and scatter        one part of the sums leaves while the next is multiplied

The passes that do it are torch's own; here stands when they may be used, and what makes our graphs fit them."""

from __future__ import annotations

import logging
import os
import warnings
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from cuboid.errors import UserError
from cuboid.parallel.groups import Group
from cuboid.parallel.shm_collectives import machine_identity
from cuboid.spec.run import Run

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""What torch wants in the environment before ranks that share a GPU may share memory: for tests, it is slow."""


def compiler_options(run: Run, group: Group, device: torch.device, traced: bool) -> dict[str, Any] | None:
    """What the compiler is to be told for the blocks of these tensor ranks, all of which call this. `traced`: it sees
    their collectives."""
    wish = run.training.overlap_tensor
    if wish == "off" or group.handle is None or group.is_fake:
        return None
    why_not = _obstacle(group.handle, group.size, device, traced)
    if why_not:
        if wish == "on":
            raise UserError(f"training.overlap_tensor=on needs {why_not}; use overlap_tensor=auto")
        return None
    share_memory(group.handle)
    return options()


def options() -> dict[str, Any]:
    from cuboid.parallel.async_tp_pass import MicroPipelinePass  # the compiler takes a second to import

    return {"_micro_pipeline_tp": True, "post_grad_custom_pre_pass": MicroPipelinePass()}


def share_memory(handle: dist.ProcessGroup) -> None:
    """Let the compiler know that the group's ranks reach one another's memory; the memory itself comes with use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is called needless, and the passes ask for it
        enable_symm_mem_for_group(handle.group_name)
    # It warns of every graph without a collective, and a block may come in several.
    logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp").setLevel(logging.ERROR)


def _obstacle(handle: dist.ProcessGroup, size: int, device: torch.device, traced: bool) -> str:
    """The same sentence on all ranks, which all have the same run and kind of device; empty: there is none."""
    if device.type != "cuda":
        return "GPUs"
    if not traced:
        return "compiled blocks with sequence_parallel, whose collectives nobody counts"
    # Symmetric memory maps another rank's buffer: NVLink peers on one machine, a GPU of its own for each rank.
    known: list[Any] = [None] * size
    dist.all_gather_object(known, (machine_identity(), device.index), group=handle)
    machines, indices = {machine for machine, _ in known}, {index for _, index in known}
    if len(machines) > 1:
        return "all tensor ranks on one machine"
    if len(indices) < size and os.environ.get(SHARED_GPU) != "1":
        return "a GPU with its own number for each tensor rank"
    reach = all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(sorted(indices), 2))
    return "" if reach else "GPUs that reach one another's memory"
