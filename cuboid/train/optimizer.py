"""AdamW on the pieces this rank keeps, with clipping by the norm of the whole gradient."""

from __future__ import annotations

import torch

from cuboid.parallel.apply import Engine
from cuboid.spec.run import OptimizerSpec


class Optimizer:
    def __init__(self, engine: Engine, spec: OptimizerSpec) -> None:
        self._units = engine.units
        self.pieces = [piece for unit in engine.units for piece in unit.pieces()]
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

    def state_bytes(self) -> int:
        states = self._adamw.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value.ndim)
