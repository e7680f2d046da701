"""A model of the catalog with another attention: in every layer but each fourth, a token sees a window before it.

    cuboid train --set model=python:examples/sliding_window.py:build --layout dp=2,tp=2
    cuboid verify --model python:examples/sliding_window.py:build --layout dp=2,tp=2,pp=2

Everything else, the splits over tensor ranks among it, is the catalog's."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid import Model, family
from cuboid.model.attention import Mix
from cuboid.model.rope import Positions
from cuboid.model.transformer import Block


def windowed(window: int) -> Mix:
    def mix(query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        """Each (sequences, length, heads, head_dim)."""
        places = torch.arange(query.shape[1], device=query.device)
        distance = places.unsqueeze(1) - places
        seen = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=(distance >= 0) & (distance < window),
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return seen.transpose(1, 2)

    return mix


def build(base: str = "tiny-llama", window: int = 16) -> Model:
    def change(block: Block, layer: int) -> None:
        if layer % 4 != 3:
            block.attention.mix = windowed(window)

    return family(base, change)
