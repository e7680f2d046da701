"""Norms by layer, on request (`output.layer_norms`): of activations, gradients, updates and weights.

Activations are measured in every step, as `parallel.stage` does it. The rest is measured around the update of some
steps (`output.layer_norms_every`), unit by unit: master weights are copied, and compared with what they have become.
That takes memory of one unit, and the time of two to four updates. Every element counts once in the job, on the rank
that answers for it, so a single sum gives the same norms on any layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from cuboid.kernels.pinned_memory import HostCopy
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.grad_norm import answers_for
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import Unit
from cuboid.training.adamw import Elements

KINDS = ("gradient_norm", "weight_norm", "update_norm")

Norms = dict[str, list[float]]
"""Kind -> by place: activations behind each block, the others of the embedding, each block and the head."""


def read_norms(squares: HostCopy) -> Norms:
    *of_weights, activations = squares.read()[0].sqrt().unbind()
    found = {"activation_rms": activations[1:-1].tolist()}  # neither embedding nor head is a block
    found |= {kind: row.tolist() for kind, row in zip(KINDS, of_weights, strict=True)}
    pairs = zip(found["update_norm"], found["weight_norm"], strict=True)
    return found | {"relative_update": [update / weight if weight else 0.0 for update, weight in pairs]}


class LayerNorms:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._world = replace(engine.groups.world, ledger=None)  # no part of the step that is predicted
        self._last = engine.run.model.all_layers + 1
        self._squares = torch.zeros(len(KINDS) + 1, self._last + 1, dtype=torch.float64, device=engine.device)

    def begin_step(self) -> None:
        self._squares.zero_()

    @contextmanager
    def around(self, unit: Unit, lot: list[Elements]) -> Iterator[None]:
        """The update of some elements of a unit."""
        counted = [each for each in lot if answers_for(self._engine, unit, each.part)]
        if not counted:
            yield
            return
        # Place 0 is the embedding, 1 to layers the blocks, the last the head.
        place, dtype = self._place(unit.name), unit.accumulate
        # A halved master is a copy already.
        before = [each.master if each.is_halved else each.master.clone() for each in counted]
        self._add(0, place, [each.gradient for each in counted], dtype)  # the update may clip it where it lies
        self._add(1, place, before, dtype)
        yield
        torch._foreach_sub_(before, [each.master for each in counted])
        self._add(2, place, before, dtype)

    def _place(self, unit: str) -> int:
        kind, _, rest = unit.partition(".")
        return int(rest.partition(".")[0]) + 1 if kind == "layers" else {"embedding": 0, "head": self._last}[kind]

    def _add(self, kind: int, place: int, tensors: list[Tensor], dtype: torch.dtype) -> None:
        # One call for all tensors, in the dtype of gradients: squares of bf16 would lose what is small.
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype))
        self._squares[kind, place] += norms.double().square().sum()

    def finish_step(self, loss_scale: Tensor | None) -> HostCopy:
        """After the update, for `read_norms`. `loss_scale`: what the gradients were multiplied by."""
        # Of gradients alone: weights and updates never had the factor.
        if loss_scale is not None:
            self._squares[0] /= loss_scale.square()
        self._squares[-1, 1:-1] = self._engine.activations.squares.double()
        return HostCopy(all_reduce(self._squares.clone(), self._world))
