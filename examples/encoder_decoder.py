"""An encoder and a decoder that learn to turn words around: two tensors flow from block to block.

    cuboid verify --model python:examples/encoder_decoder.py:build --layout dp=2,tp=2,pp=2
    cuboid train --model python:examples/encoder_decoder.py:build --layout dp=2,tp=2,pp=2 --set training.steps=50

The first half of the blocks encodes, the second half decodes and looks at what was encoded. `flow` names both tensors,
so the border between two stages may lie anywhere. Padding and labels come from the batch, which every block sees."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid import REPLICATED, Batch, ColumnLinear, Model, RowLinear, VocabularyEmbedding, VocabularyLoss

LETTERS, START, LENGTH = 26, 26, 12
VOCABULARY = LETTERS + 1


class Words:
    """Random words of random length, and the same backwards."""

    def __len__(self) -> int:
        return 65536

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, LENGTH + 1, (), generator=random))
        word = torch.randint(0, LETTERS, (LENGTH,), generator=random)
        labels = torch.full((LENGTH,), -100)
        labels[:length] = word[:length].flip(0)
        given = torch.cat((torch.tensor([START]), labels[:-1])).clamp(min=0)
        return {"source": word, "seen": torch.arange(LENGTH) < length, "given": given, "labels": labels}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.query, self.key, self.value = (ColumnLinear(hidden, hidden) for _ in range(3))
        self.output = RowLinear(hidden, hidden)

    def forward(self, x: Tensor, to: Tensor, mask: Tensor | None) -> Tensor:
        read = ((self.query, x), (self.key, to), (self.value, to))
        heads = (linear(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear, y in read)
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    sharding = {"norms.*": REPLICATED}

    def __init__(self, hidden: int, heads: int, decodes: bool) -> None:
        super().__init__()
        self.decodes = decodes
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3 if decodes else 2))
        self.attention = Attention(hidden, heads)
        self.across = Attention(hidden, heads) if decodes else None
        self.up = ColumnLinear(hidden, 2 * hidden)
        self.down = RowLinear(2 * hidden, hidden)

    def forward(self, flow: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        encoded, decoded = flow
        seen = batch["seen"][:, None, None, :]
        x = decoded if self.decodes else encoded
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, None if self.decodes else seen)
        if self.across is not None:
            x = x + self.across(self.norms[2](x), encoded, seen)
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return (encoded, x) if self.decodes else (x, decoded)


class Embedding(nn.Module):
    sharding = {"positions": REPLICATED}

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.letters = VocabularyEmbedding(VOCABULARY, hidden)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, hidden))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.letters(batch["source"]) + self.positions, self.letters(batch["given"]) + self.positions


class Head(nn.Module):
    sharding = {"norm.*": REPLICATED}

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = VocabularyLoss(hidden, VOCABULARY)

    def forward(self, flow: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        return self.output(self.norm(flow[1]), batch["labels"])


def build(hidden: int = 32, layers: int = 4, heads: int = 4) -> Model:
    return Model(
        embedding=lambda: Embedding(hidden),
        block=lambda layer: Block(hidden, heads, decodes=layer >= layers // 2),
        layers=layers,
        head=lambda: Head(hidden),
        flow=(("batch", LENGTH, hidden), ("batch", LENGTH, hidden)),
        data=Words,
        vocab=VOCABULARY,
    )
