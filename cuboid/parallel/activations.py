"""How large the residual stream is behind each block: one reduction over tokens × hidden a micro-batch, for which the
host never waits.

It is measured on what a block returns, outside of the compiled function, and takes no part in any gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.parallel.groups import Groups
from cuboid.spec.run import Run


class Activations:
    """This rank's part; the sum over all ranks is the same on any layout."""

    def __init__(self, run: Run, groups: Groups, dtype: torch.dtype, device: torch.device, held: int) -> None:
        """`held`: elements of what a block returns on this rank, of a micro-batch."""
        layout, model = run.layout, run.model
        apart = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        self._elements = held * apart * (run.training.global_batch // layout.micro_batch)
        # Tensor ranks hold tokens of their own with sequence parallelism, else all of them hold the same.
        self._counts = run.layout.sequence_parallel or groups.tensor.index == 0
        self._first = 0 if run.output.layer_norms else model.layers - 1
        self.squares = torch.zeros(model.layers, dtype=dtype, device=device)
        """Mean square over the global batch, by layer: of the last one, which the head reads, or of all if
        `output.layer_norms` says so."""

    def begin_step(self) -> None:
        self.squares.zero_()

    def add(self, layer: int, x: Tensor) -> Tensor:
        """`x` as it is: what a block returned for a micro-batch, measured if it is one of a training step."""
        if layer >= self._first and self._counts and torch.is_grad_enabled():
            with torch.no_grad():
                # Wider than x without a copy of it.
                norm = torch.linalg.vector_norm(x, dtype=self.squares.dtype)
                self.squares[layer] += norm.square() / self._elements
        return x
