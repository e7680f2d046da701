"""From the gradients each rank computed to the true ones: summed where ranks hold parts, and measured once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cuboid.kernels.adjacent import follows, in_runs, together
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.groups import Group
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.sharding import TIED, Part


def finish_gradients(engine: Engine) -> None:
    """After this every rank's optimizer shards hold the gradient of the global batch."""
    for unit in engine.units:
        unit.settle()  # what is left of the last segment starts for all units before any is waited for
    for unit in engine.units:
        unit.finish_reduction()
    # Parameters that several tensor ranks hold: their gradients are parts where ranks see other tokens or heads. After
    # the data-parallel sum, because a shard has fewer bytes than the whole.
    for sharing, group in (("tensor", engine.groups.tensor), ("kv", engine.groups.kv_replicas)):
        parts = [
            optimizer_shard.gradient
            for unit in engine.units
            for optimizer_shard in unit.optimizer_shards()
            if optimizer_shard.part.slice.sharing == sharing and optimizer_shard.part.slice.partial_gradient
        ]
        _sum_together(parts, group)
    # A tied matrix has a gradient on the first stage (lookup) and one on the last (logits); both stages update alike.
    if engine.groups.embedding is not None:
        for unit in engine.units:
            if unit.name == TIED:
                all_reduce(unit.shard_gradient, engine.groups.embedding)


def _sum_together(tensors: list[Tensor], group: Group) -> None:
    """One collective for many small tensors."""
    if not tensors or group.size == 1:
        return
    summed = all_reduce(torch.cat(tensors), group)
    for tensor, result in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(result)


def counted_shards(engine: Engine) -> Iterator[OptimizerShard]:
    """The optimizer shards this rank answers for."""
    for unit in engine.units:
        for optimizer_shard in unit.optimizer_shards():
            if answers_for(engine, unit, optimizer_shard.part):
                yield optimizer_shard


def answers_for(engine: Engine, unit: Unit, part: Part) -> bool:
    """Whether this rank counts what it holds of a parameter, so that over the whole job every element is met exactly
    once."""
    embedding = engine.groups.embedding
    replicas = unit.groups.replicate if unit.zero else unit.groups.data
    second_copy = unit.name == TIED and embedding is not None and embedding.index > 0
    holders = {"own": None, "tensor": engine.groups.tensor, "kv": engine.groups.kv_replicas}
    group = holders[part.slice.sharing]
    return replicas.index == 0 and not second_copy and (group is None or group.index == 0)


def squared_norm(engine: Engine) -> Tensor:
    """This rank's part of the squared norm of the whole gradient."""
    dtype = engine.units[0].accumulate
    total = torch.zeros((), dtype=dtype, device=engine.device)
    gradients = [optimizer_shard.gradient for optimizer_shard in counted_shards(engine)]
    if gradients and engine.device.type == "cuda" and dtype == torch.float32:
        from cuboid.kernels.triton_kernels import squared_norms

        total += squared_norms(in_runs(gradients, follows, together))
    elif gradients:
        total += torch.stack(torch._foreach_norm(gradients, 2, dtype)).square().sum()
    return total
