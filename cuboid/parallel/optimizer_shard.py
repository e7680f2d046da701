"""A parameter, or the part of it, whose master weights and optimizer state a rank keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.kernels.split_master_weights import join_halves, split_halves
from cuboid.spec.sharding import Part


@dataclass(frozen=True)
class OptimizerShard:
    """What of a parameter lies in this rank's shard: elements `start:stop` of the local tensor, flattened."""

    part: Part
    start: int
    stop: int
    stored: Tensor
    """`kept`, which may be on its way to where it is stored."""
    weight: Tensor | None
    """The same elements in the precision of the matmuls, where these are kept beside the master weights."""
    take_gradient: Callable[[], Tensor]
    settle: Callable[[], None]
    """The host waits until what is stored is there."""

    @property
    def kept(self) -> Tensor:
        """The master weights, or of each 16 bits more than `weight` has."""
        self.settle()
        return self.stored

    @property
    def is_halved(self) -> bool:
        return self.stored.dtype == torch.int16

    @property
    def master(self) -> Tensor:
        """Of a halved shard a copy: `set_master` makes it count."""
        if not self.is_halved:
            return self.kept
        assert self.weight is not None
        return join_halves(self.weight.view(torch.int16), self.kept.to(self.weight.device))

    def set_master(self, values: Tensor) -> None:
        """Write master weights and what follows from them on this rank."""
        if not self.is_halved:
            self.kept.copy_(values)
            return
        assert self.weight is not None
        near, rest = split_halves(values)
        self.weight.view(torch.int16).copy_(near)
        self.kept.copy_(rest)

    @property
    def gradient(self) -> Tensor:
        """The unit knows only after a backward pass which tensor holds it."""
        return self.take_gradient()
