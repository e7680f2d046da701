"""What a rank's memory holds, by kind."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import suppress

from cuboid.parallel.zero import Unit
from cuboid.training.optimizer import Optimizer

KINDS = ("parameters", "master weights", "optimizer", "gradients")


def held(units: Iterable[Unit], optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes of what stays from step to step, by kind."""
    bytes_of = dict.fromkeys(KINDS, 0)
    for unit in units:
        own = unit.held_bytes()
        bytes_of["parameters"] += own["parameters"]
        bytes_of["master weights"] += own["master"]
        bytes_of["gradients"] += own["gradients"]
    bytes_of["optimizer"] = optimizer.state_bytes() if optimizer is not None else 0
    return bytes_of


def storages(units: Iterable[Unit], optimizer: Optimizer) -> set[int]:
    """Of what `held` counts."""
    found = {
        moment.untyped_storage()._cdata
        for optimizer_shard in optimizer.optimizer_shards
        for moment in optimizer.state_of(optimizer_shard).values()
    }
    return found | {tensor.untyped_storage()._cdata for unit in units for tensor in unit.held_tensors()}


def left_by_autograd(units: Iterable[Unit]) -> int:
    """Bytes of gradients that no unit has taken over."""
    total = 0
    for unit in units:
        known = {tensor.untyped_storage()._cdata for tensor in unit.held_tensors()}
        grads = [parameter.grad for parameter in unit.parameters.values() if parameter.grad is not None]
        total += sum(grad.nbytes for grad in grads if grad.untyped_storage()._cdata not in known)
    return total


def held_here() -> dict[str, int]:
    """Of whatever this process has built so far: who runs out of memory may be in the middle of it."""
    found = gc.get_objects()
    optimizers = [item for item in found if type(item) is Optimizer]
    bytes_of = dict.fromkeys(KINDS, 0)
    for unit in (item for item in found if type(item) is Unit):
        with suppress(AttributeError):  # half built
            bytes_of = {kind: bytes_of[kind] + size for kind, size in held([unit], None).items()}
            bytes_of["gradients"] += left_by_autograd([unit])
    with suppress(AttributeError):
        bytes_of["optimizer"] = sum(optimizer.state_bytes() for optimizer in optimizers)
    return bytes_of
