"""A vision transformer that learns which shape is in a picture: pictures made on the spot, a classification loss.

    cuboid verify --model python:examples/vision_transformer.py:build --layout dp=2,tp=2,pp=2
    cuboid train --model python:examples/vision_transformer.py:build --layout dp=2,tp=2,pp=2 --set training.steps=50

The data set is any object with a length and a dict of tensors at each index. The head returns the *sum* of the losses
of a micro-batch, and `count` says how many they are: the mean over the whole batch is then the same on any layout."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid import REPLICATED, Batch, ColumnLinear, Model, RowLinear

SIZE, PATCH, CLASSES = 16, 4, 3
PATCHES = (SIZE // PATCH) ** 2


class Shapes:
    """Disks, squares and crosses of any size and place, with noise; each a function of its index alone."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        row, column, radius = (torch.rand(3, generator=random) * torch.tensor([6.0, 6.0, 3.0])).tolist()
        down, across = torch.meshgrid(torch.arange(SIZE) - row - 5, torch.arange(SIZE) - column - 5, indexing="ij")
        radius += 2
        inside = (
            down**2 + across**2 < radius**2,
            (down.abs() < radius) & (across.abs() < radius),
            (down.abs() < 1.5) | (across.abs() < 1.5),
        )[index % CLASSES]
        noise = 0.2 * torch.randn(SIZE, SIZE, generator=random)
        return {"image": inside.float() + noise, "label": torch.tensor(index % CLASSES)}


class Patches(nn.Module):
    sharding = {"*": REPLICATED}

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, hidden, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES, hidden))

    def forward(self, batch: Batch) -> Tensor:
        return self.project(batch["image"].unsqueeze(1)).flatten(2).transpose(1, 2) + self.positions


class Block(nn.Module):
    sharding = {"*_norm.*": REPLICATED}

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.ModuleList(ColumnLinear(hidden, hidden) for _ in range(3))
        self.output = RowLinear(hidden, hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.up = ColumnLinear(hidden, 4 * hidden)
        self.down = RowLinear(4 * hidden, hidden)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self.attention_norm(x)
        heads = (each(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.qkv)
        x = x + self.output(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))


class Classifier(nn.Module):
    sharding = {"*": REPLICATED}

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        logits = self.output(self.norm(x.mean(1)))
        return functional.cross_entropy(logits, batch["label"], reduction="sum")


def build(hidden: int = 32, layers: int = 4, heads: int = 4) -> Model:
    return Model(
        embedding=lambda: Patches(hidden),
        block=lambda layer: Block(hidden, heads),
        layers=layers,
        head=lambda: Classifier(hidden),
        flow=("batch", PATCHES, hidden),
        count=lambda batch: torch.tensor(len(batch["label"]), device=batch["label"].device),
        data=Shapes,
    )
