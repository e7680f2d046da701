"""Sums, losses and probabilities of 16-bit numbers are taken in 32 bits."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
