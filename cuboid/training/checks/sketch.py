"""A sketch of a tensor: sixteen sums of its elements with pseudo-random signs. It is linear, so the sketch of a sum is
the sum of sketches, and every element counts."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

NUMBERS = 16
CHUNK = 2**24
"""Elements that are sketched at once: this takes little memory beside a layer."""
ROW = 4096
"""Signs are those of an element's place in its row times that of the row."""


@lru_cache(maxsize=256)
def _signs(first: int, count: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """+1 or -1, by place: a multiplicative hash, of which the upper bits are mixed well."""
    places = torch.arange(first, first + count, dtype=torch.int64)
    signs = 1 - 2 * ((places * 2654435761 + 974711) % 4294967296 // 2147483648)
    return signs.to(device, kind)


def stride_of(size: int) -> int:
    """Every how many rows of a large parameter are sketched: no more elements than a chunk has."""
    return -(-size // CHUNK)


def sketch(values: Tensor, start: int = 0, stride: int = 1) -> Tensor:
    """(16,), float64. `start`: the place of the first element in the tensor that this is a part of: sketches of its
    parts add up to that of the whole. `stride`: only one row of so many counts."""
    flat = values.detach().flatten()
    if flat.numel() > CHUNK * stride:
        chunks = range(0, flat.numel(), CHUNK * stride)
        parts = [sketch(flat[first : first + CHUNK * stride], start + first, stride) for first in chunks]
        return torch.stack(parts).sum(0)
    before = start % ROW
    after = -(before + flat.numel()) % ROW
    kind = torch.promote_types(flat.dtype, torch.float32)
    rows = (pad(flat, (before, after)) if before or after else flat).view(-1, ROW)
    first = start // ROW
    rows = rows[-first % stride :: stride].to(kind)
    # A matmul reads each element once: thirty times as fast on a CPU as signs first and sums then.
    columns = _signs(-(-first // stride), len(rows), kind, flat.device) @ rows
    return (columns.double() * _signs(1 << 40, ROW, torch.float64, flat.device)).view(NUMBERS, -1).sum(1)
