"""AdamW's arithmetic on runs of elements, as one compiled pass over memory or by torch's own fused kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cuboid.kernels.adjacent import follows, together
from cuboid.kernels.precision import join_halves, split_halves
from cuboid.parallel.zero import OptimizerShard
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.spec.sharding import Part

ROW = 1024
"""Long tensors are updated as rows of this length: a compiler that knows one even length reads wider words (7 % faster
than with the length left open), and one graph still serves them all."""


Kind = tuple[bool, float]
"""Whether a parameter decays, and what multiplies its learning rate: what is alike in both is updated together."""


def kind_of(part: Part) -> Kind:
    return len(part.full_shape) > 1, part.rate_factor


@dataclass(frozen=True)
class Elements:
    """What the update of an optimizer shard, or of some of its elements, reads and writes, all of it flat and on one
    device."""

    kept: Tensor
    """The master weights, or 16 bits of each beside those of `weight`."""
    first: Tensor
    second: Tensor
    gradient: Tensor
    weight: Tensor | None
    decays: bool
    """Matrices decay; norms and biases do not."""
    rate_factor: float
    """What multiplies the learning rate, but not the decay: how strongly a weight is held back does not depend on how
    wide its matrix is, or the width would change which decay is best."""
    in_rows: bool
    part: Part
    """The parameter, or the first of them, that they belong to."""

    @classmethod
    def of(
        cls,
        optimizer_shard: OptimizerShard,
        kept: Tensor,
        first: Tensor,
        second: Tensor,
        start: int = 0,
        stop: int | None = None,
    ) -> Elements:
        """`start`, `stop`: which of the shard's elements the three tensors hold; default: all."""
        here = slice(start, stop)
        weight = None if optimizer_shard.weight is None else optimizer_shard.weight[here]
        weight = weight.view(torch.int16) if optimizer_shard.is_halved and weight is not None else weight
        in_rows = (optimizer_shard.stop - optimizer_shard.start) % ROW == 0
        return cls(
            kept,
            first,
            second,
            optimizer_shard.gradient[here],
            weight,
            *kind_of(optimizer_shard.part),
            in_rows,
            optimizer_shard.part,
        )

    @property
    def kind(self) -> Kind:
        return self.decays, self.rate_factor

    @property
    def is_halved(self) -> bool:
        return self.kept.dtype == torch.int16

    @property
    def _tensors(self) -> list[Tensor]:
        found = (self.kept, self.first, self.second, self.gradient, self.weight)
        return [tensor for tensor in found if tensor is not None]

    def is_followed_by(self, other: Elements) -> bool:
        """In memory, all of it, by what is updated alike."""
        alike = self.kind == other.kind and self.in_rows == other.in_rows
        return alike and all(map(follows, self._tensors, other._tensors))

    def with_following(self, other: Elements) -> Elements:
        return replace(
            self,
            kept=together(self.kept, other.kept),
            first=together(self.first, other.first),
            second=together(self.second, other.second),
            gradient=together(self.gradient, other.gradient),
            weight=None if self.weight is None or other.weight is None else together(self.weight, other.weight),
        )

    @property
    def master(self) -> Tensor:
        """Of halved elements a copy: `set_master` makes it count."""
        return join_halves(self.weight, self.kept) if self.is_halved and self.weight is not None else self.kept

    def set_master(self, values: Tensor) -> None:
        """`values`: what `master` gave, updated. Weights that matmuls use follow."""
        if self.weight is None:
            return
        if not self.is_halved:
            self.weight.copy_(values)
            return
        near, rest = split_halves(values)
        self.weight.copy_(near)
        self.kept.copy_(rest)


def named_moments(moments: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """As checkpoints call them."""
    return dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))


def _update(
    kept: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    numbers: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """`weight`: as int16 where `kept` is. `numbers`: clipping factor, decay factor, step size, square root of the
    second moment's correction, and whether the step counts."""
    master = read_master(kept, weight)
    scale, decay, size, correction, counts = numbers.to(master.dtype).unbind()
    clipped = gradient.to(master.dtype) * scale
    new_first = torch.lerp(first, clipped, 1 - beta1)
    new_second = second * beta2 + clipped * clipped * (1 - beta2)
    updated = master * decay - size * new_first / (new_second.sqrt() / correction + epsilon)
    takes = counts > 0
    result = torch.where(takes, updated, master)
    first.copy_(torch.where(takes, new_first, first))
    second.copy_(torch.where(takes, new_second, second))
    write_master(result, kept, weight)


def read_master(kept: Tensor, weight: Tensor | None) -> Tensor:
    """The master weight; where `kept` is its lower half (int16), `weight` is the upper one."""
    return join_halves(weight, kept) if kept.dtype == torch.int16 and weight is not None else kept


def write_master(result: Tensor, kept: Tensor, weight: Tensor | None) -> None:
    """Into the master weight, and into the weight that matmuls use."""
    if kept.dtype == torch.int16 and weight is not None:
        near, rest = split_halves(result)
        weight.copy_(near)
        kept.copy_(rest)
        return
    kept.copy_(result)
    if weight is not None:
        weight.copy_(result)


def _update_rows(*arguments: Any) -> None:
    """Its own function, because the compiler remembers by function which lengths it has met."""
    _update(*arguments)


TUNING: dict[str, Any] = {"triton.autotune_pointwise": False}
"""Else the compiler tries blocks of several sizes on copies of all that is written, gigabytes of an embedding; they are
alike fast."""


@cache
def _compiled_update(in_rows: bool) -> Any:
    if in_rows:
        return torch.compile(_update_rows, fullgraph=True, options=TUNING)
    return torch.compile(_update, dynamic=True, fullgraph=True, options=TUNING)


def update_compiled(elements: Elements, spec: OptimizerSpec, numbers: Tensor) -> None:
    """`numbers`: on the device, as `_update` takes them."""

    def shaped(tensor: Tensor) -> Tensor:
        if not elements.in_rows:
            return tensor.view(-1)
        rows = tensor.view(-1, ROW)
        # One graph from the first call on: another one might round other matmuls, and who meets which length first
        # depends on where the state lies.
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return rows

    held = (elements.kept, elements.first, elements.second, elements.gradient)
    weight = None if elements.weight is None else shaped(elements.weight)
    betas = (spec.beta1, spec.beta2, spec.epsilon)
    _compiled_update(elements.in_rows)(*map(shaped, held), weight, numbers, *betas)


def update_eagerly(
    elements: Iterable[Elements], spec: OptimizerSpec, learning_rate: float, steps: Tensor, scale: float
) -> None:
    """`steps`: taken before this one. `scale`: what gradients are multiplied by."""
    every = list(elements)
    for decays, factor in sorted({each.kind for each in every}):
        chosen = [each for each in every if each.kind == (decays, factor)]
        # torch multiplies decay by the learning rate it is given.
        decay = spec.weight_decay / factor if decays else 0.0
        # Halved elements need their master weights in full for a moment: one shard at a time.
        together = [[each] for each in chosen if each.is_halved]
        together += [[each for each in chosen if not each.is_halved]]
        for group in filter(None, together):
            _update_together(group, spec, learning_rate * factor, decay, steps, scale)


def _update_together(
    group: list[Elements], spec: OptimizerSpec, learning_rate: float, decay: float, steps: Tensor, scale: float
) -> None:
    masters = [each.master for each in group]
    gradients = [each.gradient.to(master.dtype) for each, master in zip(group, masters, strict=True)]
    if scale < 1:
        torch._foreach_mul_(gradients, scale)
    adamw(
        masters,
        gradients,
        [each.first for each in group],
        [each.second for each in group],
        [],
        [steps.float() for _ in group],
        fused=True,
        amsgrad=False,
        beta1=spec.beta1,
        beta2=spec.beta2,
        lr=learning_rate,
        weight_decay=decay,
        eps=spec.epsilon,
        maximize=False,
    )
    for each, master in zip(group, masters, strict=True):
        each.set_master(master)
