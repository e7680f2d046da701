"""Modules of one's own made ready for a rank: buffers, what flows between stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.model.custom import Batch, Flow, Model

Shapes = list[tuple[int, ...]]


def carry_buffers(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Buffers are computed with, as parameters are: on the device, in the precision of the weights."""
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            child._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype)


class Carrier:
    """What goes from block to block, as the one tensor that stages send one another."""

    def __init__(self, model: Model, sequences: int, length: int) -> None:
        """Of micro-batches of so many sequences."""
        self.shapes = model.flow_shapes(sequences, length)
        self._sizes = [math.prod(shape) for shape in self.shapes]

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return self.shapes[0] if len(self.shapes) == 1 else (sum(self._sizes),)

    def unpack(self, x: Tensor) -> Flow:
        if len(self.shapes) == 1:
            return x
        parts = x.split(self._sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def pack(self, flow: Flow, name: str) -> Tensor:
        given = flow if isinstance(flow, tuple) else (flow,)
        found = [tuple(part.shape) for part in given]
        if found != self.shapes:
            raise UserError(f"{name} returns {found}, but Model(flow=…) says {self.shapes}; mend one of them")
        # Several tensors travel as one flat message: stages post receives of one known size.
        return given[0] if len(given) == 1 else torch.cat([part.flatten() for part in given])


def runner(module: nn.Module, prefix: str, carrier: Carrier, loss: torch.dtype) -> Callable[[Tensor, Batch], Tensor]:
    """(packed x, batch) -> packed x; of the head, the summed loss in `loss` precision."""
    if prefix == "embedding":
        return lambda x, batch: carrier.pack(module(batch), prefix)
    if prefix == "head":
        return lambda x, batch: cast(Tensor, module(carrier.unpack(x), batch)).to(loss)
    return lambda x, batch: carrier.pack(module(carrier.unpack(x), batch), prefix)


def initial_tensors(model: Model, prefix: str, seed: int) -> dict[str, Tensor]:
    """Full tensors by the name in the whole model, as the module itself initialises them."""
    module = model.segment(prefix, seed)
    return {model.called(f"{prefix}.{name}"): parameter.detach() for name, parameter in module.named_parameters()}
