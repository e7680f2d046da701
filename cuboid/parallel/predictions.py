"""Multi-token prediction: the losses of prediction layers, beside that of the model.

The last stage ends in its layers, the prediction layers and the head. What a prediction layer is given, it passes on
with what it adds: rows of the model's own hidden states first, then of each prediction layer; so one tensor goes from
segment to segment, as everywhere, and the head reads all of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuboid.model.transformer import Prediction
from cuboid.parallel.rank_batch import RankBatch

Reader = Callable[[Tensor, Tensor, bool], Tensor]
"""(hidden states, labels, whether they are the model's own) -> the summed loss."""


class PredictionLosses:
    """Of a step, on this rank. All keeps its memory: a CUDA graph reads it and adds to it."""

    def __init__(self, coefficient: float, depths: int, dtype: torch.dtype, device: torch.device) -> None:
        self._coefficient = coefficient / depths
        self._factors = torch.zeros(depths, dtype=dtype, device=device)
        self.counts = torch.zeros(depths, dtype=torch.float64, device=device)
        """Labels of each prediction layer in the global batch."""
        self.summed = torch.zeros(depths, dtype=dtype, device=device)
        """The losses of each, over this rank's tokens, without the coefficient."""

    def begin_step(self, counts: Tensor) -> None:
        """`counts`: labels of the global batch, the model's own first. The loss will be divided by its own; that of a
        prediction layer is a mean over those that it has."""
        self.summed.zero_()
        self.counts.copy_(counts[1:])
        self._factors.copy_(self._coefficient * counts[0].double() / self.counts.clamp(min=1))

    def total(self, x: Tensor, batch: RankBatch, read: Reader) -> Tensor:
        """The model's own loss, whose backward also begins those of prediction layers."""
        own, *others = x.chunk(1 + len(batch.further) if torch.is_grad_enabled() else 1)
        loss = read(own, batch.labels, True)
        for depth, (hidden, further) in enumerate(zip(others, batch.further, strict=False)):
            each = read(hidden, further.labels, False)
            self.summed[depth] += each.detach()
            weighted = each * self._factors[depth]
            loss = loss + (weighted - weighted.detach())  # zero, with a gradient
        return loss


def counted(batches: list[RankBatch]) -> Tensor:
    """Labels of a rank's micro-batches, and of each prediction layer."""
    own = torch.stack([batch.counted for batch in batches]).sum()
    if not batches[0].further:
        return own
    depths = range(len(batches[0].further))
    others = [torch.stack([batch.counted_further(depth) for batch in batches]).sum() for depth in depths]
    return torch.stack([own, *others])


def predict(layer: Prediction, depth: int, run: Callable[..., Tensor], x: Tensor, batch: RankBatch) -> Tensor:
    """`x`, with the rows that a prediction layer adds. `run`: its block. An evaluation needs none."""
    if depth == 0:
        x = layer.final_norm(x)
    if not torch.is_grad_enabled():
        return x
    before = x.chunk(1 + depth)[-1]
    made = layer.head_norm(run(layer.join(before, batch.further[depth].tokens), batch.positions))
    return torch.cat((x, made))
