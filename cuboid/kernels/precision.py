"""16-bit numbers: what is taken in 32 bits instead, split master weights, and the loss scale of fp16."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Sums, losses and probabilities of 16-bit numbers are taken in 32 bits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# A float32 number as the bf16 number nearest to it and 16 bits of difference: master weights beside the weights that
# matmuls use cost two bytes each instead of four, and lose nothing.
#
# Ties are rounded away from zero, unlike elsewhere: only then does the difference of the two patterns fit 16 bits.


def join_halves(near: Tensor, rest: Tensor) -> Tensor:
    """near: int16, the pattern of a bf16 number; rest: int16 → float32."""
    return ((near.to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


def split_halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → what `join_halves` takes."""
    pattern = values.view(torch.int32)
    near = (pattern + 0x8000) >> 16
    return near.to(torch.int16), (pattern - (near << 16)).to(torch.int16)


# The factor by which the loss is multiplied in fp16, so that small gradients are not rounded to nothing.
#
# It halves when a gradient overflows, in a step whose update is then skipped, and doubles after many good steps. All of
# it happens on the device from numbers that are equal on all ranks, so that nobody waits and all ranks agree.


SMALLEST = 1.0
"""What overflows without any factor is no matter of the factor."""


class LossScale:
    def __init__(self, start: float, growth_steps: int, device: torch.device) -> None:
        self._growth_steps = growth_steps
        self._first = [start, 0.0, 0.0]
        self._state = torch.tensor(self._first, dtype=torch.float64, device=device)

    @property
    def factor(self) -> Tensor:
        return self._state[0]

    @property
    def overflows(self) -> Tensor:
        """Of all steps so far."""
        return self._state[2]

    def update(self, loss: Tensor, gradient_norm: Tensor, counts: Tensor) -> None:
        """After a step. `counts`: false where its update was skipped, for whatever reason."""
        factor, good, overflows = self._state.unbind()
        overflowed = loss.isfinite() & ~gradient_norm.isfinite()
        good = torch.where(overflowed, 0.0, good + counts)
        grows = good >= self._growth_steps
        smaller = (factor / 2).clamp(min=SMALLEST)
        factor = torch.where(overflowed, smaller, torch.where(grows, factor * 2, factor))
        self._state = torch.stack((factor, torch.where(grows, 0.0, good), overflows + overflowed))

    def values(self) -> list[float]:
        """For a checkpoint."""
        return [float(value) for value in self._state.tolist()]

    def restore(self, values: list[float]) -> None:
        """Nothing: as it was at first."""
        self._state = torch.tensor(values or self._first, dtype=torch.float64, device=self._state.device)
