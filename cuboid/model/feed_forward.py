"""The feed-forward block of a layer without experts, and the shared experts of one that has them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.model.linear import ColumnLinear, RowLinear, columns
from cuboid.model.rope import Positions
from cuboid.spec.model import ModelSpec


class FeedForward(nn.Module):
    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate = ColumnLinear(model.hidden, width, model.mlp_bias) if model.activation == "swiglu" else None
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
        return self.down(functional.silu(gate) * up)
