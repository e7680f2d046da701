"""A language model without attention: a gated linear recurrence over the sequence (a diagonal state-space block), after
a short causal convolution.

    cuboid verify --model python:examples/state_space.py:build --layout dp=2,tp=2,pp=2
    cuboid train --model python:examples/state_space.py:build --layout dp=2,tp=2,pp=2 --set training.steps=50

Channels are independent of one another, so they are split over tensor ranks: convolution, decay and skip alike.
`split(0)` says so; what acts on all channels is replicated."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid import REPLICATED, Batch, ColumnLinear, Model, RowLinear, VocabularyEmbedding, VocabularyLoss, split

VOCABULARY = 259


class StateSpace(nn.Module):
    sharding = {"kernel": split(0), "decay": split(0), "skip": split(0)}

    def __init__(self, hidden: int, inner: int, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.signal, self.gate, self.step = (ColumnLinear(hidden, inner) for _ in range(3))
        self.kernel = nn.Parameter(torch.randn(inner, 1, width) / width)
        self.decay = nn.Parameter(torch.log(torch.linspace(0.5, 4.0, inner)))
        self.skip = nn.Parameter(torch.ones(inner))
        self.output = RowLinear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        signal = functional.pad(self.signal(x).transpose(1, 2), (self.width - 1, 0))
        signal = functional.silu(functional.conv1d(signal, self.kernel, groups=self.kernel.shape[0])).transpose(1, 2)
        step = functional.softplus(self.step(x))  # (batch, length, channels of this rank)
        logs = -step * self.decay.exp()
        state, states = torch.zeros_like(signal[:, 0]), []
        for place in range(x.shape[1]):
            state = logs[:, place].exp() * state + step[:, place] * signal[:, place]
            states.append(state)
        mixed = torch.stack(states, 1) + self.skip * signal
        return self.output(mixed * functional.silu(self.gate(x)))


class Block(nn.Module):
    sharding = {"norm.weight": REPLICATED}

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.mixer = StateSpace(hidden, 2 * hidden)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self.mixer(self.norm(x))


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


def build(hidden: int = 48, layers: int = 4) -> Model:
    return Model(
        embedding=lambda: Embedding(hidden),
        block=lambda layer: Block(hidden),
        layers=layers,
        head=lambda: Head(hidden),
        flow=("batch", "sequence", hidden),
        vocab=VOCABULARY,
    )
