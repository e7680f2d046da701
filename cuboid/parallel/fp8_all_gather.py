"""ZeRO 3 gathers in fp8 the weights that fp8 matmuls would quantise anyway: half the bytes of bf16.

Each parameter has one scale, from its amax over the ranks of the group. One max-all-reduce after each update finds all
amaxes and carries the few parameters that stay in 16 bits (norms, biases, routers): a rank gives what it holds, and the
least number for what it does not. Scales are powers of two, so the gathered parameters are exactly what the matmuls
would have made of the whole ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cuboid.model.fp8 import INPUT, exponent_of
from cuboid.parallel.collectives import Pending, all_reduce_maximum, start_all_gather
from cuboid.parallel.groups import Group
from cuboid.spec.sharding import Part


class Fp8Shard:
    def __init__(
        self, parts: list[Part], fp8: Collection[str], begin: int, end: int, group: Group, sizes: Sequence[int] | None
    ) -> None:
        """`sizes`: of all shards, where they are not equal."""
        self._quantised = [part for part in parts if part.name in fp8]
        self._rest = [part for part in parts if part.name not in fp8]
        self._begin, self._end, self._group, self._sizes = begin, end, group, sizes
        self._shard: Tensor | None = None

    def forget(self) -> None:
        """The weights have changed."""
        self._shard = None

    def start_gather(self, weights: Tensor) -> Pending:
        """The bytes of all shards are its result. `weights`: of this rank's shard."""
        if self._shard is None:
            self._shard = self._round(weights)
        return start_all_gather(self._shard, self._group, sizes=self._sizes)

    def _held(self, part: Part) -> tuple[slice, slice]:
        """Which elements of the shard belong to a part, and which of the part they are."""
        start = min(max(part.offset, self._begin), self._end)
        stop = max(min(part.offset + part.size, self._end), start)
        return slice(start - self._begin, stop - self._begin), slice(start - part.offset, stop - part.offset)

    def _round(self, weights: Tensor) -> Tensor:
        sizes = [part.size for part in self._rest]
        # (amaxes, then whole 16-bit parameters): a maximum with -inf is what another rank holds, so one all-reduce
        # brings both.
        shown = weights.new_full((len(self._quantised) + sum(sizes),), -math.inf, dtype=torch.float32)
        for place, part in enumerate(self._quantised):
            held = weights[self._held(part)[0]]
            if held.numel():
                shown[place] = held.abs().amax()
        for part, values in zip(self._rest, shown[len(self._quantised) :].split(sizes), strict=True):
            here, there = self._held(part)
            values[there] = weights[here].float()
        all_reduce_maximum(shown, self._group)
        exponents = exponent_of(shown[: len(self._quantised)], INPUT)
        self._scales = torch.exp2(exponents).unbind()
        self._others = shown[len(self._quantised) :].split(sizes)
        # Times a power of two in float32 and one rounding: bit for bit what `quantise` makes of the whole parameter.
        quantised = torch.zeros_like(weights, dtype=INPUT)
        for part, inverse in zip(self._quantised, torch.exp2(-exponents).unbind(), strict=True):
            here, _ = self._held(part)
            quantised[here] = (weights[here].float() * inverse).to(INPUT)
        return quantised.view(torch.uint8)

    def widen(self, gathered: Tensor, flat: Tensor) -> None:
        """From the bytes of all shards to the parameters."""
        quantised = gathered.view(INPUT)
        for part, scale in zip(self._quantised, self._scales, strict=True):
            place = slice(part.offset, part.offset + part.size)
            flat[place].copy_(quantised[place]).mul_(scale)
        for part, values in zip(self._rest, self._others, strict=True):
            flat[part.offset : part.offset + part.size].copy_(values)
