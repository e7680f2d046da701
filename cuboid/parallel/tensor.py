"""Tensor parallelism: heads, feed-forward columns and vocabulary rows split over the ranks of a group.

Between two regions activations are either whole on every rank, or, with sequence parallelism, split by token:

    norm → enter (gather tokens) → column matmuls → … → row matmul → leave (sum, scatter tokens) → residual

Backward, the collective that leaves through `enter` overlaps with the matmuls of weight gradients: `Region.columns`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.model.attention import Attention
from cuboid.model.custom import VocabularyLoss
from cuboid.model.linear import ColumnLinear, Norm, RowLinear, VocabularyEmbedding, WholeNorm
from cuboid.model.moe import RoutedExperts
from cuboid.model.transformer import Block, Embedding, Head, Prediction
from cuboid.parallel.collectives import all_gather
from cuboid.parallel.cross_entropy import split_cross_entropy
from cuboid.parallel.groups import Group
from cuboid.parallel.tensor_region import Region
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import kv_head_of_query, vocabulary_rows


def connect_region(module: nn.Module, region: Region) -> None:
    """Let the layers of a module that are split over tensor ranks communicate."""
    size, index = region.group.size, region.group.index
    for child in module.modules():
        if isinstance(child, ColumnLinear | RowLinear | VocabularyEmbedding | WholeNorm):
            child.region = region
        if isinstance(child, VocabularyEmbedding):
            # A rank without the others finds its tokens in its own rows: with zeros in all layers a GPU is faster.
            holder = 0 if region.group.is_fake else index
            child.first_row, _ = vocabulary_rows(child.num_embeddings, size, holder)
        if isinstance(child, VocabularyLoss):
            child.summed_loss = _loss_of(child.out_features, region.group)
        if isinstance(child, Head):
            child.summed_loss = _loss_of(child.output.out_features, region.group)
        if isinstance(child, RoutedExperts):
            _split_tokens(child, region)


def _loss_of(vocabulary: int, group: Group) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: split_cross_entropy(logits, labels, vocabulary, group)


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


def _split_tokens(mixture: RoutedExperts, region: Region) -> None:
    """Routed experts are not split: each tensor rank routes its part of the tokens."""
    group = region.group
    mixture.part = (group.index, group.size)
    if not region.sequence_parallel:
        # Without sequence parallelism all tensor ranks hold all tokens: each takes its part, and the results are
        # gathered.
        mixture.take_part = lambda x: _LocalPart.apply(x, group)
        mixture.put_together = lambda x: _GatherParts.apply(x, group)


# The modules of a model without memory, split while there are only shapes. Who trains and who generates puts parameters
# of this rank's part in place. `region`: None without tensor parallelism.


def make_embedding(model: ModelSpec, region: Region | None) -> Embedding:
    with torch.device("meta"):
        embedding = Embedding(model)
    if region is not None:
        connect_region(embedding, region)
        if region.sequence_parallel and embedding.positions is not None:
            embedding.positions.register_forward_pre_hook(
                lambda _, arguments: (arguments[0].chunk(region.group.size)[region.group.index],)
            )
    return embedding


def make_block(model: ModelSpec, layer: int, region: Region | None, device: torch.device) -> Block:
    with torch.device("meta"):
        block = Block(model, layer) if layer < model.layers else Prediction(model, layer)
        if isinstance(block, Prediction) and layer == model.layers:
            block.final_norm = Norm(model, model.hidden)
    if region is None:
        return block
    connect_region(block, region)
    if isinstance(block.attention, Attention):
        served = kv_head_of_query(model, region.group.size, region.group.index)
        if served is not None:
            block.attention.kv_head_of_query = torch.tensor(served, device=device)
    return block


def make_head(model: ModelSpec, region: Region | None) -> Head:
    with torch.device("meta"):
        head = Head(model)
    if model.prediction_layers:  # the first of them has the norm, because all of them read behind it
        head.norm = nn.Identity()  # type: ignore[assignment]
    if region is not None:
        connect_region(head, region)
    return head
