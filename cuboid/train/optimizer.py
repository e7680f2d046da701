"""AdamW on the pieces this rank keeps, with clipping by the norm of the whole gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.parallel.apply import Engine
from cuboid.parallel.unit import Piece
from cuboid.spec.run import OptimizerSpec


class Optimizer:
    def __init__(self, engine: Engine, spec: OptimizerSpec) -> None:
        self._units = engine.units
        self.pieces = [piece for unit in engine.units for piece in unit.pieces()]
        self._masters = {piece.part.name: piece.master for piece in self.pieces}
        for piece in self.pieces:
            piece.master.grad = piece.gradient
        # Matrices decay; norms and biases do not.
        decayed = [piece.master for piece in self.pieces if len(piece.part.full_shape) > 1]
        plain = [piece.master for piece in self.pieces if len(piece.part.full_shape) == 1]
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            fused=True,
        )

    def step(self, learning_rate: float, gradient_norm: float, clip: float) -> None:
        if clip > 0 and gradient_norm > clip:
            torch._foreach_mul_([piece.gradient for piece in self.pieces], clip / (gradient_norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        for unit in self._units:
            unit.publish()

    def moments(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Both moments of a piece, made of zeros if no step was taken yet; what is written into them counts."""
        state = self._state_of(piece)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=piece.master.device)
            state["exp_avg"] = torch.zeros_like(piece.master)
            state["exp_avg_sq"] = torch.zeros_like(piece.master)
        return state["exp_avg"], state["exp_avg_sq"]

    @property
    def steps_taken(self) -> int:
        return max((int(state["step"]) for state in self._adamw.state.values()), default=0)

    def set_steps_taken(self, steps: int) -> None:
        for piece in self.pieces:
            self.moments(piece)
            self._state_of(piece)["step"].fill_(steps)

    def _state_of(self, piece: Piece) -> dict[str, Tensor]:
        """By name: a unit makes its pieces anew whenever it is asked."""
        return self._adamw.state[self._masters[piece.part.name]]  # type: ignore[no-any-return]

    def state_bytes(self) -> int:
        states = self._adamw.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value.ndim)
