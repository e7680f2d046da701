"""Dropout that does not depend on the layout: whether a number is dropped is a function of the seed, the sequence (by
its number in the order of the data), the token's position, the place in the model and the feature.

Nothing of it is kept: the backward pass, like a recomputation, makes the same mask again out of a key of 64 bits for
each token. A number takes two rounds of 32-bit arithmetic, which the compiler fuses with what comes before and after:
no generator has a state that a checkpoint would hold or a rank could be ahead with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.kernels.pinned_memory import to_device
from cuboid.model.initialize import hashed, key_number

LONGEST = 28
"""Bits of a position in a sequence."""
GOLDEN, FIRST, SECOND = -0x61C88647, -0x7A143595, -0x3D4D51CB
"""Odd constants as int32, which wrap around when multiplied: Weyl's, and the two of MurmurHash3's finalizer."""


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Nobody waits for them."""
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, device=device)
    return to_device(torch.tensor(numbers), device)


def token_keys(numbers: Sequence[int], positions: Tensor) -> Tensor:
    """(tokens, 2) in int32: two random halves for each token. `numbers`: of its sequences in the order of the data;
    `positions`: (length) in its sequence, the same of every one."""
    first = on_device(numbers, positions.device) << LONGEST
    return _keys((first.unsqueeze(1) + positions).flatten())


def _keys(places: Tensor) -> Tensor:
    return hashed(key_number("dropout"), places).view(torch.int32).view(-1, 2)


def _mixed(bits: Tensor) -> Tensor:
    """A permutation of 32 bits in which each of them depends on all."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * FIRST
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * SECOND
    return bits ^ ((bits >> 16) & 0xFFFF)


def kept(keys: Tensor, site: Tensor, width: int, rate: float) -> Tensor:
    """(tokens, width): what is not dropped. `site`: (2), of the place in the model."""
    row = keys ^ site
    features = torch.arange(width, dtype=torch.int32, device=keys.device) * GOLDEN
    # Both halves of a key decide, one after the other: equal rows would need 64 equal bits.
    bits = _mixed(_mixed(row[:, :1] + features) ^ row[:, 1:])
    return bits >= round(rate * 2**32) - 2**31


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, keys: Tensor, site: Tensor, rate: float) -> Tensor:
        # Not as saved tensors: a recomputation would run to the end of the block, whose last collective nobody needs.
        context.keys, context.site, context.rate = keys, site, rate
        return _dropped(x, keys, site, rate)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(gradient, context.keys, context.site, context.rate), None, None, None


def _dropped(x: Tensor, keys: Tensor, site: Tensor, rate: float) -> Tensor:
    return torch.where(kept(keys, site, x.shape[-1], rate), x * (1 / (1 - rate)), 0.0)


class _AtSite(nn.Module):
    """Dropout at one place in the model."""

    site: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise UserError(f"Dropout({rate}) leaves nothing to learn from; use a rate below 1, like 0.1")
        self.rate = rate
        # A tensor, not a number: the compiler would make each layer a graph of its own.
        self.register_buffer("site", torch.zeros(2, dtype=torch.int32), persistent=False)

    def at(self, place: str, seed: int) -> None:
        """`place`: as the whole model calls it."""
        number = torch.tensor([key_number(f"{seed}/dropout/{place}")], device=self.site.device)
        self.site = number.view(torch.int32)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class ResidualDropout(_AtSite):
    """Of what a block adds to the residual stream, or an embedding begins it with."""

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """x: (tokens, hidden). `keys`: of these tokens; without them, as in evaluation and generation, nothing is
        dropped."""
        dropped: Tensor = x if keys is None else _Drop.apply(x, keys, self.site, self.rate)
        return dropped


def residual_dropout(rate: float, place: str, seed: int, device: torch.device) -> ResidualDropout:
    made = ResidualDropout(rate).to(device)
    made.at(place, seed)
    return made


NUMBERS = "cuboid.numbers"
"""The field of a batch for a model of one's own, (sequences): their numbers in the order of the data. It is there in
training alone."""


class Dropout(_AtSite):
    """`self.dropout(x, batch)` in a module of one's own. `x` has the samples of the micro-batch in its first dimension
    and is whole on every tensor rank."""

    def forward(self, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        numbers = batch.get(NUMBERS)
        if numbers is None or not self.rate:
            return x
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        places = (numbers.unsqueeze(1) << LONGEST) + torch.arange(rows.shape[1], device=x.device)
        dropped: Tensor = _Drop.apply(rows.flatten(0, 1), _keys(places.flatten()), self.site, self.rate)
        return dropped.view(x.shape)


def name_dropouts(module: nn.Module, prefix: str, seed: int) -> None:
    """Give each `Dropout` in a module the place that it has in the whole model."""
    for name, child in module.named_modules():
        if isinstance(child, Dropout):
            child.at(f"{prefix}.{name}", seed)
