"""Which device a rank computes on."""

from __future__ import annotations

import warnings

import torch

from cuboid.errors import UserError

# Autograd computes in a thread of its own, which has no CUDA context before its first matmul; torch then makes it so.
warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")


def choose_device(wanted: str, local_rank: int, field: str = "training.device") -> torch.device:
    """`auto` is a GPU where there is one; ranks share GPUs in turn where there are more ranks. `field`: as
    the user has named it, `--device` where it is an option."""
    if wanted == "cuda" and not torch.cuda.is_available():
        name = field.rpartition(".")[2]
        raise UserError(f"{field}=cuda but this machine has no usable GPU; use {name}=cpu or {name}=auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def joined_device(wanted: str) -> torch.device:
    """Of a rank that has joined the others, which made its GPU the current one: only there is its number among the
    ranks of its machine known."""
    device = choose_device(wanted, 0)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
