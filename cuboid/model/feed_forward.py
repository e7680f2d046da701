"""The feed-forward block of a layer without experts, and the shared experts of one that has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.model.linear import ColumnLinear, RowLinear, columns
from cuboid.model.rope import Positions
from cuboid.spec.model import ModelSpec

CLAMP, SIGMOID_FACTOR = 7.0, 1.702
"""Of GPT-OSS."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (up + 1) * (gate * torch.sigmoid(gate * SIGMOID_FACTOR))


Gating = Callable[[Tensor, Tensor], Tensor]
"""From gate and up to what goes down."""
GATINGS: dict[str, Gating] = {"swiglu": swiglu, "geglu": geglu, "clamped_swiglu": clamped_swiglu}
"""By `ModelSpec.activation`."""


class FeedForward(nn.Module):
    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate = ColumnLinear(model.hidden, width, model.mlp_bias) if model.is_gated else None
        self.gating: Gating = GATINGS.get(model.activation, swiglu)
        self.up = ColumnLinear(model.hidden, width, model.mlp_bias)
        self.down = RowLinear(width, model.hidden, model.mlp_bias)
        self.fused: Callable[[Tensor], Tensor] | None = None
        """All but the last matmul with gate and up in one, where something else knows how."""

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Every token alike, wherever it stands."""
        if self.fused is not None:
            return self.down(self.fused(x))
        if self.gate is None:
            (up,) = columns(x, (self.up,))
            return self.down(functional.gelu(up, approximate="tanh"))
        gate, up = columns(x, (self.gate, self.up))
        return self.down(self.gating(gate, up))
