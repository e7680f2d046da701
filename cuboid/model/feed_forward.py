"""The feed-forward block of a layer without experts, and the shared experts of one that has them."""

from __future__ import annotations

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

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Every token alike, wherever it stands."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x), approximate="tanh"))
        return self.down(functional.silu(self.gate(x)) * self.up(x))
