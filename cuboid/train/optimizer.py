"""AdamW on the pieces this rank keeps, with clipping by the norm of the whole gradient.

On a GPU the update is one compiled pass over memory per piece: it reads the gradient in whatever precision it was
computed, scales it, updates master weight and moments, and writes the weight the products use. Learning rate, clipping
and the decision to leave a step out are numbers on the device, so the host never waits for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cuboid.parallel.apply import Engine
from cuboid.parallel.halves import join_halves, split_halves
from cuboid.parallel.unit import Piece, Unit
from cuboid.spec.training import OptimizerSpec


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
    """`kept`: the master weights, or 16 bits of each beside those of `weight`, which then is given as int16. `numbers`:
    clipping factor, decay factor, step size, square root of the second moment's correction, and whether the step
    counts."""
    halved = kept.dtype == torch.int16
    master = join_halves(weight, kept) if halved and weight is not None else kept
    scale, decay, size, correction, counts = numbers.to(master.dtype).unbind()
    clipped = gradient.to(master.dtype) * scale
    new_first = torch.lerp(first, clipped, 1 - beta1)
    new_second = second * beta2 + clipped * clipped * (1 - beta2)
    updated = master * decay - size * new_first / (new_second.sqrt() / correction + epsilon)
    takes = counts > 0
    result = torch.where(takes, updated, master)
    first.copy_(torch.where(takes, new_first, first))
    second.copy_(torch.where(takes, new_second, second))
    if halved and weight is not None:
        near, rest = split_halves(result)
        weight.copy_(near)
        kept.copy_(rest)
        return
    kept.copy_(result)
    if weight is not None:
        weight.copy_(result)


ROW = 1024
"""Long tensors are updated as rows of this length: a compiler that knows one even length reads wider words (7 % faster
than with the length left open), and one graph still serves them all."""


def _update_rows(*arguments: Any) -> None:
    """Its own function, because the compiler remembers by function which lengths it has met."""
    _update(*arguments)


@cache
def _compiled_update(in_rows: bool) -> Any:
    if in_rows:
        return torch.compile(_update_rows, fullgraph=True)
    return torch.compile(_update, dynamic=True, fullgraph=True)


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, ROW) if tensor.numel() % ROW == 0 else tensor.view(-1)


class Optimizer:
    def __init__(self, engine: Engine, spec: OptimizerSpec) -> None:
        self._units = engine.units
        self._spec = spec
        self._compiled = engine.compiled
        pieces = [piece for unit in engine.units for piece in unit.pieces()]
        self._moments = {piece.part.name: (_zeros(piece), _zeros(piece)) for piece in pieces}
        self._steps = torch.zeros((), dtype=torch.float64, device=engine.device)
        apart = self._compiled and engine.device.type == "cuda"
        self._stream = torch.cuda.Stream(engine.device) if apart else None  # type: ignore[no-untyped-call]

    def step(
        self,
        learning_rate: float,
        gradient_norm: Tensor,
        clip: float,
        finite: Tensor,
        loss_scale: Tensor | None = None,
    ) -> None:
        """`finite`: false leaves the whole step out. `loss_scale`: what the gradients are still multiplied by, though
        not their norm. All tensors are equal on all ranks."""
        scale = (clip / (gradient_norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(gradient_norm)
        if loss_scale is not None:
            scale = scale / loss_scale
        if self._compiled:
            self._step_on_device(learning_rate, scale, finite)
            return
        self._step_on_host(learning_rate, scale, finite)
        for unit in self._units:
            unit.publish()

    def _step_on_device(self, learning_rate: float, scale: Tensor, finite: Tensor) -> None:
        """Unit by unit in the order of the forward pass, on a stream of its own: the next step begins with the units
        that are ready, and its products fill the time in which an update waits for memory."""
        spec = self._spec
        self._steps += finite
        size = learning_rate / (1 - spec.beta1**self._steps)
        correction = (1 - spec.beta2**self._steps).sqrt()
        plain, decay = torch.ones_like(size), torch.full_like(size, 1 - learning_rate * spec.weight_decay)
        numbers = [
            torch.stack((scale.double(), factor, size, correction, finite.double())) for factor in (plain, decay)
        ]
        if self._stream is None:
            for unit in self._units:
                self._update_unit(unit, numbers)
                unit.publish(written=True)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in numbers:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            for unit in self._units:
                read = self._update_unit(unit, numbers)
                unit.publish(written=True)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
                unit.is_being_updated(done, read)

    def _update_unit(self, unit: Unit, numbers: list[Tensor]) -> list[Tensor]:
        """Returns the gradients."""
        spec = self._spec
        betas = (spec.beta1, spec.beta2, spec.epsilon)
        read = []
        for piece in unit.pieces():
            gradient = piece.gradient
            weight = piece.weight.view(torch.int16) if piece.is_halved and piece.weight is not None else piece.weight
            tensors = [_in_rows(tensor) for tensor in (piece.kept, *self.moments(piece), gradient)]
            update = _compiled_update(tensors[0].dim() > 1)
            update(*tensors, None if weight is None else _in_rows(weight), numbers[_decays(piece)], *betas)
            read.append(gradient)
        return read

    def _step_on_host(self, learning_rate: float, scale: Tensor, finite: Tensor) -> None:
        if not finite:
            return
        pieces = self.pieces
        for decays in (True, False):
            chosen = [piece for piece in pieces if _decays(piece) == decays]
            # A halved piece needs its master weights in full for a moment: one at a time.
            together = [[piece] for piece in chosen if piece.is_halved]
            together += [[piece for piece in chosen if not piece.is_halved]]
            for group in filter(None, together):
                decay = self._spec.weight_decay if decays else 0.0
                self._step_together(group, learning_rate, decay, float(scale))
        self._steps += 1

    def _step_together(self, pieces: list[Piece], learning_rate: float, decay: float, scale: float) -> None:
        masters = [piece.master for piece in pieces]
        gradients = [piece.gradient.to(master.dtype) for piece, master in zip(pieces, masters, strict=True)]
        if scale < 1:
            torch._foreach_mul_(gradients, scale)
        adamw(
            masters,
            gradients,
            [self.moments(piece)[0] for piece in pieces],
            [self.moments(piece)[1] for piece in pieces],
            [],
            [self._steps.float() for _ in pieces],
            fused=True,
            amsgrad=False,
            beta1=self._spec.beta1,
            beta2=self._spec.beta2,
            lr=learning_rate,
            weight_decay=decay,
            eps=self._spec.epsilon,
            maximize=False,
        )
        for piece, master in zip(pieces, masters, strict=True):
            if piece.is_halved:
                piece.set_master(master)

    @property
    def pieces(self) -> list[Piece]:
        """Asked for anew each step: a piece's gradient may be another tensor each time."""
        return [piece for unit in self._units for piece in unit.pieces()]

    def moments(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Both moments of a piece; what is written into them counts."""
        return self._moments[piece.part.name]

    @property
    def steps_taken(self) -> int:
        return int(self._steps)

    def set_steps_taken(self, steps: int) -> None:
        self._steps.fill_(steps)

    def state_bytes(self) -> int:
        return sum(moment.nbytes for pair in self._moments.values() for moment in pair)


def _zeros(piece: Piece) -> Tensor:
    return torch.zeros_like(piece.kept, dtype=torch.float32 if piece.is_halved else piece.kept.dtype)


def _decays(piece: Piece) -> bool:
    """Matrices decay; norms and biases do not."""
    return len(piece.part.full_shape) > 1
