"""The state of a training as full tensors: parameters and both moments of the optimizer, by the parameter's name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from cuboid.checkpoint.boxes import boxes_of_piece
from cuboid.checkpoint.scattered import Scattered
from cuboid.parallel.apply import Engine
from cuboid.parallel.gradients import counted_pieces
from cuboid.parallel.unit import Piece

KINDS = ("parameter", "exp_avg", "exp_avg_sq")


class Moments(Protocol):
    """What a checkpoint needs of an optimizer."""

    @property
    def steps_taken(self) -> int: ...

    def set_steps_taken(self, steps: int) -> None: ...

    def moments(self, piece: Piece) -> tuple[Tensor, Tensor]: ...


def state_to_save(engine: Engine, optimizer: Moments) -> dict[str, Scattered]:
    """What this rank answers for; over all ranks every element once."""
    return _state(counted_pieces(engine), optimizer)


def state_to_load(engine: Engine, optimizer: Moments) -> dict[str, Scattered]:
    """Everything this rank keeps, copies of other ranks' state included."""
    return _state((piece for unit in engine.units for piece in unit.pieces()), optimizer)


def weights_to_load(engine: Engine) -> dict[str, Scattered]:
    """The parameters this rank keeps, by name."""
    return {piece.part.name: _scattered(piece, piece.master) for unit in engine.units for piece in unit.pieces()}


def _state(pieces: Iterable[Piece], optimizer: Moments) -> dict[str, Scattered]:
    state: dict[str, Scattered] = {}
    for piece in pieces:
        tensors = dict(zip(KINDS, (piece.master, *optimizer.moments(piece)), strict=True))
        for kind, values in tensors.items():
            state[f"{kind}/{piece.part.name}"] = _scattered(piece, values)
    return state


def _scattered(piece: Piece, values: Tensor) -> Scattered:
    boxes = tuple(
        (box, values[place : place + box.size].view(box.lengths))
        for box, place in boxes_of_piece(piece.part, piece.start, piece.stop)
    )
    return Scattered(piece.part.full_shape, values.dtype, boxes)
