"""Blocks of numbers as bytes for the slow link, and back: in 32, 16, 8 or 4 bits. A block is rounded by itself, so it
comes out the same whichever rank owns it."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.spec.islands import BLOCK

LEVELS = {8: 127, 4: 7}
"""The largest whole number of a block; its scale is a float32 in front."""


def encode(values: Tensor, bits: int) -> Tensor:
    """(blocks, 256) numbers as (blocks, bytes)."""
    if not len(values):  # an owner may have nothing of a fragment
        return torch.empty(0, BLOCK * bits // 8 + (4 if bits < 16 else 0), dtype=torch.uint8)
    if bits == 32:
        return values.contiguous().view(torch.uint8)
    if bits == 16:
        return values.to(torch.bfloat16).view(torch.uint8)
    scales = (values.abs().amax(1, keepdim=True) / LEVELS[bits]).float()
    # A block of zeros has no scale, and is zeros whatever it is divided by.
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).to(values.dtype)
    whole = (values / divisors).round().clamp(-LEVELS[bits], LEVELS[bits]).to(torch.int8)
    if bits == 4:
        lifted = (whole + 8).view(torch.uint8)
        packed = lifted[:, 0::2] | (lifted[:, 1::2] << 4)
    else:
        packed = whole.view(torch.uint8)
    return torch.cat((scales.view(torch.uint8), packed), 1)


def decode(wire: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What `encode` made, as numbers of this precision."""
    if not len(wire):
        return torch.empty(0, BLOCK, dtype=dtype)
    if bits == 32:
        return wire.contiguous().view(dtype)
    if bits == 16:
        return wire.contiguous().view(torch.bfloat16).to(dtype)
    scales, packed = wire[:, :4].contiguous().view(torch.float32), wire[:, 4:].contiguous()
    if bits == 8:
        whole = packed.view(torch.int8)
    else:
        whole = torch.stack((packed & 15, packed >> 4), 2).view(len(wire), BLOCK).view(torch.int8) - 8
    return whole.to(dtype) * scales.to(dtype)
