"""The feed-forward block of a layer without experts, and the shared experts of one that has them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.model.linear import Linear
from cuboid.model.rope import Positions
from cuboid.spec.model import ModelSpec


class FeedForward(nn.Module):
    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate = Linear(model.hidden, width, model.mlp_bias) if model.activation == "swiglu" else None
        self.up = Linear(model.hidden, width, model.mlp_bias)
        self.down = Linear(width, model.hidden, model.mlp_bias)
        self.joined: Callable[[Tensor], Tensor] | None = None
        """All but the last product with gate and up in one, where something else knows how."""

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Every token alike, wherever it stands."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x), approximate="tanh"))
        return self.down(functional.silu(self.gate(x)) * self.up(x) if self.joined is None else self.joined(x))
