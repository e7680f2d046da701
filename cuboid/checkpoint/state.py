"""The state of a training as full tensors: parameters and what the optimizer keeps of each, by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from cuboid.checkpoint.shards import ShardedTensor, TensorSlice, slices_of_shard
from cuboid.parallel.grad_norm import counted_shards
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import OptimizerShard

PARAMETER = "parameter"
AVERAGE = "average"
"""Moving, of the weights."""
GENERATOR = "generator"


class Moments(Protocol):
    """What a checkpoint needs of an optimizer."""

    @property
    def steps_taken(self) -> int: ...

    def set_steps_taken(self, steps: int) -> None: ...

    def begin_average(self) -> None:
        """The average of weights, where one is kept, is the weights as they are now."""

    def state_of(self, optimizer_shard: OptimizerShard) -> dict[str, Tensor]:
        """By kind; flat, or one number of the whole parameter."""

    @property
    def beside(self) -> Callable[[], dict[str, ShardedTensor]]:
        """What else there is, under names of its own; what a checkpoint does not have of it stays as it is."""

    def rows(self) -> Iterator[tuple[str, int, list[tuple[int, Tensor]]]]:
        """What is kept by row of a parameter, on one rank of all: its kind and name, the rows in all, and from which
        row on each tensor holds them."""


def state_to_save(engine: Engine, optimizer: Moments) -> dict[str, ShardedTensor]:
    """What this rank answers for; over all ranks every element once."""
    return _state(counted_shards(engine), optimizer, saved=True) | _rows(optimizer) | optimizer.beside()


def state_to_load(engine: Engine, optimizer: Moments) -> dict[str, ShardedTensor]:
    """Everything this rank keeps, copies of other ranks' state included. What is filled counts once the units
    publish it."""
    for unit in engine.units:
        unit.open()
    shards = (optimizer_shard for unit in engine.units for optimizer_shard in unit.optimizer_shards())
    return _state(shards, optimizer, saved=False) | _rows(optimizer) | optimizer.beside()


def weights_to_load(engine: Engine) -> dict[str, ShardedTensor]:
    """The parameters this rank keeps, by name. What is filled counts once the units publish it."""
    for unit in engine.units:
        unit.open()
    return {
        optimizer_shard.part.name: _sharded(optimizer_shard, optimizer_shard.kept)
        for unit in engine.units
        for optimizer_shard in unit.optimizer_shards()
    }


def _state(optimizer_shards: Iterable[OptimizerShard], optimizer: Moments, saved: bool) -> dict[str, ShardedTensor]:
    state: dict[str, ShardedTensor] = {}
    for optimizer_shard in optimizer_shards:
        name = optimizer_shard.part.name
        state[f"{PARAMETER}/{name}"] = _sharded(optimizer_shard, optimizer_shard.kept)
        begins = optimizer_shard.start == 0 and optimizer_shard.part.slice.start == 0
        for kind, values in optimizer.state_of(optimizer_shard).items():
            if values.ndim:
                state[f"{kind}/{name}"] = _sharded(optimizer_shard, values)
            elif begins or not saved:  # of a number all ranks hold a copy: one saves it
                one = TensorSlice((0,), (1,), 0)
                state[f"{kind}/{name}"] = ShardedTensor((1,), values.dtype, ((one, values.view(1)),))
    return state


def _rows(optimizer: Moments) -> dict[str, ShardedTensor]:
    return {
        name: ShardedTensor(
            (total,),
            parts[0][1].dtype,
            tuple((TensorSlice((start,), (len(values),), start), values) for start, values in parts),
        )
        for name, total, parts in optimizer.rows()
    }


def _sharded(optimizer_shard: OptimizerShard, values: Tensor) -> ShardedTensor:
    """`values`: a moment of the optimizer shard, or what it keeps as master weights."""

    def slices(whole: Tensor) -> Iterator[tuple[TensorSlice, Tensor]]:
        for tensor_slice, place in slices_of_shard(optimizer_shard.part, optimizer_shard.start, optimizer_shard.stop):
            yield tensor_slice, whole[place : place + tensor_slice.size].view(tensor_slice.lengths)

    if values is not optimizer_shard.kept or not optimizer_shard.is_halved or optimizer_shard.weight is None:
        return ShardedTensor(optimizer_shard.part.full_shape, values.dtype, tuple(slices(values)))
    near = tuple(part for _, part in slices(optimizer_shard.weight.view(torch.int16)))
    return ShardedTensor(optimizer_shard.part.full_shape, torch.float32, tuple(slices(values)), near)


# The state of a rank's random generators, kept as tensors beside the model's. Nothing draws from them today (weights
# and samples come from keyed generators of their own), so a layout may change; what will draw continues bit for bit.


def seed_generators(seed: int, rank: int) -> None:
    """PyTorch begins with another state in every process; a run begins with its own, on each rank another."""
    torch.manual_seed(((seed << 24) + rank) % (1 << 63))


def generators(engine: Engine) -> dict[str, ShardedTensor]:
    """A copy of their state now, under names of this rank's own."""
    states = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    rank = engine.groups.world.index
    return {
        f"{GENERATOR}/{kind}/{rank:05d}": ShardedTensor(
            tuple(state.shape), state.dtype, ((TensorSlice((0,), tuple(state.shape), 0), state),)
        )
        for kind, state in states.items()
    }


def restore_generators(engine: Engine, states: dict[str, ShardedTensor]) -> str:
    """Returns the first that is no state, or nothing: its bytes may be a stranger's."""
    for name, held in states.items():
        state = held.slices[0][1]
        try:
            if name.split("/")[1] == "cuda":
                torch.cuda.set_rng_state(state, engine.device)
            else:
                torch.set_rng_state(state)
        except RuntimeError:
            return name
    return ""
