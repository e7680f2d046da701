"""Linear layers with a weight of shape (out, in), and the normalisations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.spec.model import ModelSpec

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Module):
    """`nn.Linear` whose matmul can be replaced, because some schedules compute the weight gradient later."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.matmul: Matmul = functional.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)


Columns = Callable[[Tensor, Sequence[Linear]], Sequence[Tensor]]
"""From one input to what several linears make of it."""


def columns(x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    """One after the other; tensor parallelism has another way."""
    return [linear(x) for linear in linears]


SlicedColumns = Callable[[Sequence[Tensor], Sequence[Linear | None]], Sequence[Tensor]]
"""From several inputs to what a linear makes of each; None leaves its input as it is."""


def sliced_columns(inputs: Sequence[Tensor], linears: Sequence[Linear | None]) -> list[Tensor]:
    """As `columns`."""
    return [x if linear is None else linear(x) for x, linear in zip(inputs, linears, strict=True)]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension."""

    def __init__(self, model: ModelSpec, size: int, epsilon: float | None = None) -> None:
        super().__init__()
        self.size = size
        self.epsilon = model.norm_epsilon if epsilon is None else epsilon
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return functional.rms_norm(x, (self.size,), self.weight, self.epsilon)
        return functional.layer_norm(x, (self.size,), self.weight, self.bias, self.epsilon)
