"""The state of a training as full tensors: parameters and both moments of the optimizer, by the parameter's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from cuboid.checkpoint.boxes import Box, boxes_of_piece
from cuboid.checkpoint.scattered import Scattered
from cuboid.parallel.grad_norm import counted_pieces
from cuboid.parallel.optimizer_shard import OptimizerShard
from cuboid.parallel.parallelize import Engine

KINDS = ("parameter", "exp_avg", "exp_avg_sq")


class Moments(Protocol):
    """What a checkpoint needs of an optimizer."""

    @property
    def steps_taken(self) -> int: ...

    def set_steps_taken(self, steps: int) -> None: ...

    def moments(self, piece: OptimizerShard) -> tuple[Tensor, Tensor]: ...


def state_to_save(engine: Engine, optimizer: Moments) -> dict[str, Scattered]:
    """What this rank answers for; over all ranks every element once."""
    return _state(counted_pieces(engine), optimizer)


def state_to_load(engine: Engine, optimizer: Moments) -> dict[str, Scattered]:
    """Everything this rank keeps, copies of other ranks' state included. What is filled counts once the units
    publish it."""
    for unit in engine.units:
        unit.open()
    return _state((piece for unit in engine.units for piece in unit.pieces()), optimizer)


def weights_to_load(engine: Engine) -> dict[str, Scattered]:
    """The parameters this rank keeps, by name. What is filled counts once the units publish it."""
    for unit in engine.units:
        unit.open()
    return {piece.part.name: _scattered(piece, piece.kept) for unit in engine.units for piece in unit.pieces()}


def _state(pieces: Iterable[OptimizerShard], optimizer: Moments) -> dict[str, Scattered]:
    state: dict[str, Scattered] = {}
    for piece in pieces:
        for kind, values in zip(KINDS, (piece.kept, *optimizer.moments(piece)), strict=True):
            state[f"{kind}/{piece.part.name}"] = _scattered(piece, values)
    return state


def _scattered(piece: OptimizerShard, values: Tensor) -> Scattered:
    """`values`: a moment of the piece, or what it keeps as master weights."""

    def boxes(whole: Tensor) -> Iterator[tuple[Box, Tensor]]:
        for box, place in boxes_of_piece(piece.part, piece.start, piece.stop):
            yield box, whole[place : place + box.size].view(box.lengths)

    if values is not piece.kept or not piece.is_halved or piece.weight is None:
        return Scattered(piece.part.full_shape, values.dtype, tuple(boxes(values)))
    near = tuple(part for _, part in boxes(piece.weight.view(torch.int16)))
    return Scattered(piece.part.full_shape, torch.float32, tuple(boxes(values)), near)
