"""A full tensor of which this rank holds some boxes, to be saved or filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.checkpoint.boxes import Box


@dataclass(frozen=True)
class Scattered:
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[Box, Tensor], ...]
    """Each box with its values, a view of what the rank really holds, so that loading fills it in place."""
    near: tuple[Tensor, ...] = ()
    """Of halved values: `boxes` hold the rest, these what it is the rest of. Such can be saved, not filled."""
