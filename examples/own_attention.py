"""A decoder with an attention of its own: every head sees a window of the last tokens, and adds a bias by distance.

    cuboid verify --model python:examples/own_attention.py:build --layout dp=2,tp=2,pp=2
    cuboid train --model python:examples/own_attention.py:build --layout dp=2,tp=2,pp=2 --set training.steps=50

`ColumnLinear` and `RowLinear` split heads and feed-forward columns over tensor ranks. A rank finds out how many heads
it has from what it computed: nothing here knows of ranks. `Dropout` drops the same numbers whichever they are."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid import (
    REPLICATED,
    Batch,
    ColumnLinear,
    Dropout,
    Model,
    RowLinear,
    VocabularyEmbedding,
    VocabularyLoss,
    split,
)

VOCABULARY = 259


class WindowAttention(nn.Module):
    sharding = {"slope": split(0)}

    def __init__(self, hidden: int, heads: int, window: int) -> None:
        super().__init__()
        self.head_dim, self.window = hidden // heads, window
        self.qkv = nn.ModuleList(ColumnLinear(hidden, hidden, bias=False) for _ in range(3))
        self.slope = nn.Parameter(torch.linspace(0.1, 1.0, heads))
        self.output = RowLinear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, heads of this rank, length, head_dim)
        query, key, value = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.qkv)
        places = torch.arange(x.shape[1], device=x.device)
        distance = places.unsqueeze(1) - places
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5 - self.slope.view(-1, 1, 1) * distance.abs()
        scores = scores.masked_fill((distance < 0) | (distance >= self.window), float("-inf"))
        return self.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    sharding = {"*_norm.weight": REPLICATED}

    def __init__(self, hidden: int, heads: int, window: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = WindowAttention(hidden, heads, window)
        self.feed_forward_norm = nn.RMSNorm(hidden)
        self.up = ColumnLinear(hidden, 4 * hidden)
        self.down = RowLinear(4 * hidden, hidden)
        self.attention_dropout, self.feed_forward_dropout = Dropout(dropout), Dropout(dropout)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)), batch)
        made = self.down(functional.silu(self.up(self.feed_forward_norm(x))))
        return x + self.feed_forward_dropout(made, batch)


class Embedding(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.tokens = VocabularyEmbedding(VOCABULARY, hidden)

    def forward(self, batch: Batch) -> Tensor:
        return self.tokens(batch["tokens"])


class Head(nn.Module):
    sharding = {"norm.weight": REPLICATED}

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.output = VocabularyLoss(hidden, VOCABULARY)

    def logits(self, x: Tensor, batch: Batch) -> Tensor:  # for `cuboid generate` alone
        return self.output.logits(self.norm(x))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.output(self.norm(x), batch["labels"])


def build(hidden: int = 64, layers: int = 4, heads: int = 4, window: int = 16, dropout: float = 0.0) -> Model:
    return Model(
        embedding=lambda: Embedding(hidden),
        block=lambda layer: Block(hidden, heads, window * 2 ** (layer % 2), dropout),
        layers=layers,
        head=lambda: Head(hidden),
        flow=("batch", "sequence", hidden),
        vocab=VOCABULARY,
    )
