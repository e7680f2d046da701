"""Tensor parallelism: heads, feed-forward columns and vocabulary rows split over the ranks of a group.

Between two regions activations are either whole on every rank, or, with sequence parallelism, split by token:

    norm → enter (gather tokens) → column matmuls → … → row matmul → leave (sum, scatter tokens) → residual

Backward, the collective that leaves through `enter` overlaps with the matmuls of weight gradients: `columns`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.precision import wide
from cuboid.model.feed_forward import FeedForward
from cuboid.model.linear import Linear
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.moe import MoE
from cuboid.model.transformer import IGNORED, Block, Embedding, Head, VocabularyEmbedding
from cuboid.parallel.collectives import all_gather, all_reduce, all_reduce_maximum
from cuboid.parallel.groups import Group
from cuboid.parallel.tensor_region import Region, columns, sliced_columns
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import kv_head_of_query, vocabulary_rows


class ColumnLinear(Linear):
    """A matmul whose output columns are split."""

    def __init__(self, whole: Linear, region: Region) -> None:
        super().__init__(whole.weight.shape[1], whole.weight.shape[0], bias=whole.bias is not None)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        return columns(self.region, x, (self,))[0]


class RowLinear(Linear):
    """A matmul whose input columns are split: the parts are summed before the bias is added once."""

    def __init__(self, whole: Linear, region: Region) -> None:
        super().__init__(whole.weight.shape[1], whole.weight.shape[0], bias=whole.bias is not None)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(self.matmul(x, self.weight, None))
        return y if self.bias is None else y + self.bias


class SplitVocabularyEmbedding(VocabularyEmbedding):
    """Each rank looks up the rows it holds; the rest are zero until the sum."""

    def __init__(self, whole: VocabularyEmbedding, region: Region, first_row: int) -> None:
        super().__init__(whole.weight.shape[0], whole.weight.shape[1])
        self.region = region
        self.first_row = first_row

    def forward(self, indices: Tensor) -> Tensor:
        local = indices - self.first_row
        held = (local >= 0) & (local < self.weight.shape[0])
        rows = functional.embedding(local.where(held, 0), self.weight)
        return self.region.leave(rows * held.unsqueeze(1))


class _SplitVocabularyLoss(torch.autograd.Function):
    """Cross-entropy over logits whose columns are split; they are never gathered."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, first: int, rows: int, group: Group) -> Tensor:
        logits = logits.to(wide(logits.dtype), copy=True)
        logits[:, rows:] = -torch.inf  # columns that only pad the vocabulary
        peak = all_reduce_maximum(logits.amax(1), group)
        exponentials = logits.sub_(peak.unsqueeze(1)).exp()
        counted = labels != IGNORED
        column = labels - first
        held = counted & (column >= 0) & (column < rows)
        column = column.where(held, 0).unsqueeze(1)
        target = torch.where(held, logits.gather(1, column).squeeze(1), 0)
        total, target = all_reduce(torch.stack((exponentials.sum(1), target)), group).unbind()
        losses = torch.where(counted, total.log() - target, 0)
        context.save_for_backward(exponentials.div_(total.unsqueeze(1)), column, held, counted)
        return losses.sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, column, held, counted = context.saved_tensors
        result = probabilities.scatter_add(1, column, -held.to(probabilities.dtype).unsqueeze(1))
        return result.mul_((counted * gradient).unsqueeze(1)), None, None, None, None


def split_vocabulary_loss(logits: Tensor, labels: Tensor, first: int, rows: int, group: Group) -> Tensor:
    """Summed cross-entropy over logits whose columns are split, of which this rank has `rows` from `first` on."""
    loss: Tensor = _SplitVocabularyLoss.apply(logits, labels, first, rows, group)
    return loss


def split_embedding(embedding: Embedding, model: ModelSpec, region: Region) -> None:
    first, _ = vocabulary_rows(model.vocab, region.group.size, region.group.index)
    embedding.tokens = SplitVocabularyEmbedding(embedding.tokens, region, first)
    if region.sequence_parallel and embedding.positions is not None:
        embedding.positions.register_forward_pre_hook(
            lambda _, arguments: (arguments[0].chunk(region.group.size)[region.group.index],)
        )


class _LocalPart(torch.autograd.Function):
    """Whole → this rank's part of the tokens; the gradient is gathered."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return x.chunk(group.size)[group.index]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient.contiguous(), context.group), None


class _GatherParts(torch.autograd.Function):
    """Parts of the tokens → whole; every rank has the whole gradient and takes its part."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(context.group.size)[context.group.index], None


def split_block(block: Block, model: ModelSpec, region: Region, device: torch.device) -> None:
    attention, feed_forward = block.attention, block.feed_forward
    if isinstance(attention, MultiLatentAttention):
        # Behind the latents, which are shorter than what they are made of.
        attention.columns = partial(sliced_columns, region)
    else:
        served = kv_head_of_query(model, region.group.size, region.group.index)
        if served is not None:
            attention.kv_head_of_query = torch.tensor(served, device=device)
        attention.columns = partial(columns, region)
    attention.output = RowLinear(attention.output, region)
    if isinstance(feed_forward, MoE):
        _split_mixture(feed_forward, region)
    else:
        _split_feed_forward(feed_forward, region)


def _split_feed_forward(feed_forward: FeedForward, region: Region) -> None:
    feed_forward.columns = partial(columns, region)
    feed_forward.down = RowLinear(feed_forward.down, region)


def _split_mixture(mixture: MoE, region: Region) -> None:
    """Routed experts are not split: each tensor rank routes its part of the tokens."""
    group = region.group
    mixture.part = (group.index, group.size)
    if not region.sequence_parallel:
        mixture.take_part = lambda x: _LocalPart.apply(x, group)
        mixture.put_together = lambda x: _GatherParts.apply(x, group)
    if mixture.shared is not None:
        _split_feed_forward(mixture.shared, region)


def split_head(head: Head, model: ModelSpec, region: Region) -> None:
    first, rows = vocabulary_rows(model.vocab, region.group.size, region.group.index)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return _SplitVocabularyLoss.apply(logits, labels, first, rows, region.group)

    head.output = ColumnLinear(head.output, region)
    head.summed_loss = loss
