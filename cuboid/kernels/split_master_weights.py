"""A float32 number as the bf16 number nearest to it and 16 bits of difference: master weights beside the weights that
matmuls use cost two bytes each instead of four, and lose nothing.

Ties are rounded away from zero, unlike elsewhere: only then does the difference of the two patterns fit 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def join_halves(near: Tensor, rest: Tensor) -> Tensor:
    """near: int16, the pattern of a bf16 number; rest: int16 → float32."""
    return ((near.to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


def split_halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → what `join_halves` puts together."""
    pattern = values.view(torch.int32)
    near = (pattern + 0x8000) >> 16
    return near.to(torch.int16), (pattern - (near << 16)).to(torch.int16)
