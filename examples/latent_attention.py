"""A model of the catalog with an attention that it does not have: keys and values of all heads come from one short
vector of a token (multi-head latent attention), here in one file.

    cuboid train --set model=python:examples/latent_attention.py:build --layout dp=2,tp=2
    cuboid verify --model python:examples/latent_attention.py:build --layout dp=2,tp=2,pp=2

The short vector is the same on every tensor rank (REPLICATED); heads are split by the layers that make and end them."""

from torch import Tensor, nn

from cuboid import REPLICATED, ColumnLinear, Model, RowLinear, family
from cuboid.model.attention import causal_mix
from cuboid.model.rope import Positions, rotate
from cuboid.model.transformer import Block


class LatentAttention(nn.Module):
    sharding = {"down.weight": REPLICATED, "norm.weight": REPLICATED}

    def __init__(self, hidden: int, heads: int, latent: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.query = ColumnLinear(hidden, hidden, bias=False)
        self.down = nn.Linear(hidden, latent, bias=False)
        self.norm = nn.RMSNorm(latent)
        self.key, self.value = (ColumnLinear(latent, hidden, bias=False) for _ in range(2))
        self.output = RowLinear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x: (tokens of all sequences, hidden)."""
        short = self.norm(self.down(x))
        query, key, value = (
            made.view(-1, positions.length, made.shape[1] // self.head_dim, self.head_dim)  # heads of this rank
            for made in (self.query(x), self.key(short), self.value(short))
        )
        mixed = causal_mix(rotate(query, positions), rotate(key, positions), value, positions)
        return self.output(mixed.flatten(0, 1).flatten(1))


def build(base: str = "tiny-llama", hidden: int = 64, heads: int = 8, latent: int = 24) -> Model:
    def change(block: Block, layer: int) -> None:
        block.attention = LatentAttention(hidden, heads, latent)

    return family(base, change)
