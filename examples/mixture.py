"""A decoder with a mixture of experts of its own: small experts with a squared ReLU, of which each token uses two.

    cuboid verify --model python:examples/mixture.py:build --layout dp=2,ep=2
    cuboid train --model python:examples/mixture.py:build --layout dp=2,tp=2,ep=4 --set training.steps=50

Parameters of shape (experts, …) are declared as EXPERT: expert-parallel ranks hold a part of the experts each, and
tokens travel to them and back. `Router` is the catalog's, with its load balancing; `route` may compute anything else
that returns a `Routing`."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid import (
    EXPERT,
    REPLICATED,
    Batch,
    ColumnLinear,
    MixtureSpec,
    Model,
    RoutedExperts,
    Router,
    Routing,
    RowLinear,
    Tokens,
    VocabularyEmbedding,
    VocabularyLoss,
)

VOCABULARY = 259


class Experts(RoutedExperts):
    sharding = {"up": EXPERT, "down": EXPERT}

    def __init__(self, hidden: int, mixture: MixtureSpec) -> None:
        super().__init__(mixture.experts)
        width = mixture.expert_ffn
        self.router = Router(hidden, mixture)
        self.up = nn.Parameter(torch.randn(mixture.experts, width, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(mixture.experts, hidden, width) * width**-0.5)

    def route(self, x: Tensor, tokens: Tokens) -> Routing:
        return self.router(x, tokens)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.matmul(self.matmul(rows, self.up, counts).relu().square(), self.down, counts)


class Block(nn.Module):
    sharding = {"*_norm.weight": REPLICATED}

    def __init__(self, hidden: int, heads: int, mixture: MixtureSpec) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.ModuleList(ColumnLinear(hidden, hidden, bias=False) for _ in range(3))
        self.output = RowLinear(hidden, hidden, bias=False)
        self.experts_norm = nn.RMSNorm(hidden)
        self.experts = Experts(hidden, mixture)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (each(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.qkv)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        return x + self.experts(self.experts_norm(x))


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


def build(hidden: int = 64, layers: int = 4, heads: int = 4, experts: int = 8) -> Model:
    mixture = MixtureSpec(experts=experts, top_k=2, expert_ffn=hidden, balance_coefficient=0.01, z_coefficient=0.001)
    return Model(
        embedding=lambda: Embedding(hidden),
        block=lambda layer: Block(hidden, heads, mixture),
        layers=layers,
        head=lambda: Head(hidden),
        flow=("batch", "sequence", hidden),
        vocab=VOCABULARY,
    )
