"""Layers of a weight, and how they are split over tensor ranks: linears of shape (out, in), the table of tokens, norms.

A layer declares in `sharding` how each of its parameters is split. Without a `region` it is whole, on one device. With
one it holds this rank's part of the weights, and the region communicates where activations enter and leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.precision import wide
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import COLUMN, REPLICATED, ROW, VOCABULARY, Split


class Matmul(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...


class Region(Protocol):
    """Between `enter` and `leave`, activations are split over tensor ranks; elsewhere all of them hold the same, or,
    with sequence parallelism, each the tokens of its own."""

    def enter(self, x: Tensor) -> Tensor:
        """As it is, or all tokens; backward, the sum of what the ranks give."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        ...

    def columns(self, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        """`enter`, and what linears of split outputs make of it."""
        ...

    def sliced_columns(self, inputs: Sequence[Tensor], linears: Sequence[Linear | None]) -> Sequence[Tensor]:
        """The same of one input for each linear; None leaves its input as it is."""
        ...

    def mean(self, x: Tensor) -> Tensor:
        """Over the ranks."""
        ...


class Linear(nn.Linear):
    """Its matmul can be replaced: by one in fp8, or one whose weight gradient a schedule computes later."""

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.matmul: Matmul = functional.linear

    def reset_parameters(self) -> None:
        # Without memory there is nothing to draw, and trying would import the compiler: a second in every rank.
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)


class ColumnLinear(Linear):
    """Splits its outputs over tensor ranks: into heads, into the width of a feed-forward block, or as `split` says."""

    sharding: Mapping[str, Split] = {"weight": COLUMN, "bias": COLUMN}
    region: Region | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = True, split: Split = COLUMN) -> None:
        super().__init__(inputs, outputs, bias)
        self.sharding = {"weight": split, "bias": split}

    def forward(self, x: Tensor) -> Tensor:
        if self.region is None:
            return super().forward(x)
        return self.region.columns(x, (self,))[0]


class CappedLinear(ColumnLinear):
    """What it makes becomes cap · tanh(it / cap)."""

    def __init__(self, inputs: int, outputs: int, split: Split, cap: float) -> None:
        super().__init__(inputs, outputs, False, split)
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) / self.cap) * self.cap


class RowLinear(Linear):
    """Takes inputs that are split over tensor ranks, and sums what they give; the bias is added once."""

    sharding: Mapping[str, Split] = {"weight": ROW, "bias": REPLICATED}
    region: Region | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.region is None:
            return super().forward(x)
        y = self.region.leave(self.matmul(x, self.weight, None))
        return y if self.bias is None else y + self.bias


class Table(nn.Embedding):
    """Rows to look up."""

    weight: nn.Parameter

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # as of `Linear`
            super().reset_parameters()


class VocabularyEmbedding(Table):
    """Splits its rows over tensor ranks: each looks up what it holds, the rest is zero until the sum."""

    sharding: Mapping[str, Split] = {"weight": VOCABULARY}
    region: Region | None = None
    first_row = 0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.region is None:
            return functional.embedding(tokens, self.weight)
        local = tokens - self.first_row
        held = (local >= 0) & (local < self.weight.shape[0])
        rows = functional.embedding(local.where(held, 0), self.weight)
        return self.region.leave(rows * held.unsqueeze(-1))


def columns(x: Tensor, linears: Sequence[ColumnLinear]) -> Sequence[Tensor]:
    """What several linears make of one input, which enters their region once."""
    region = linears[0].region
    return [linear(x) for linear in linears] if region is None else region.columns(x, linears)


def sliced_columns(
    region: Region | None, inputs: Sequence[Tensor], linears: Sequence[Linear | None]
) -> Sequence[Tensor]:
    """What a linear makes of each input; None leaves its input as it is. All of them enter the region at once."""
    if region is not None:
        return region.sliced_columns(inputs, linears)
    return [x if linear is None else linear(x) for x, linear in zip(inputs, linears, strict=True)]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension."""

    def __init__(self, model: ModelSpec, size: int, epsilon: float | None = None) -> None:
        super().__init__()
        self.size = size
        self.epsilon = model.norm_epsilon if epsilon is None else epsilon
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if model.norm == "layernorm" else None
        self.unit = model.unit_norms

    @property
    def factor(self) -> Tensor:
        """What it multiplies by; in float32 or better where that is not the weight itself."""
        return 1 + self.weight.to(wide(self.weight.dtype)) if self.unit else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.unit:
            factor = self.factor
            return functional.rms_norm(x.to(factor.dtype), (self.size,), factor, self.epsilon).to(x.dtype)
        if self.bias is None:
            return functional.rms_norm(x, (self.size,), self.weight, self.epsilon)
        return functional.layer_norm(x, (self.size,), self.weight, self.bias, self.epsilon)


class WholeNorm(nn.Module):
    """RMSNorm of all heads of queries, or of keys, together, of which a tensor rank holds a part."""

    region: Region | None = None

    def __init__(self, model: ModelSpec, size: int, split: Split) -> None:
        super().__init__()
        self.epsilon, self.unit = model.norm_epsilon, model.unit_norms
        self.weight = nn.Parameter(torch.empty(size))
        self.sharding: Mapping[str, Split] = {"weight": split}


def whole_norms(query: Tensor, key: Tensor, norms: tuple[WholeNorm, WholeNorm]) -> tuple[Tensor, Tensor]:
    """Each (sequences, length, heads, head_dim). Tensor ranks add what their heads have of both means at once."""
    inputs = [x.flatten(2).to(wide(x.dtype)) for x in (query, key)]
    # Where ranks hold the same key-value heads, all heads are on as many ranks: the mean over ranks is that over heads.
    means = torch.cat([x.square().mean(-1, keepdim=True) for x in inputs], -1)
    region = norms[0].region
    if region is not None:
        means = region.mean(means)
    made = []
    for place, (x, norm) in enumerate(zip(inputs, norms, strict=True)):
        weight = norm.weight.to(x.dtype) + norm.unit
        made.append(x * torch.rsqrt(means[..., place : place + 1] + norm.epsilon) * weight)
    return made[0].view(query.shape).to(query.dtype), made[1].view(key.shape).to(key.dtype)


def declared_split(module: nn.Module, name: str) -> Split | None:
    """What the module of a parameter says of it in `sharding`, or one around that; patterns such as `norm.*` count."""
    path = name.split(".")
    for depth in range(len(path) - 1, -1, -1):
        owner = module.get_submodule(".".join(path[:depth]))
        table: Mapping[str, Split] = getattr(owner, "sharding", {})
        inner = ".".join(path[depth:])
        for pattern, declared in table.items():
            if fnmatch(inner, pattern):
                return declared
    return None
