"""Sixteen sums of a tensor's elements with signs: linear, so that the sketch of a sum is the sum of sketches, and no
element is without a part in it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

NUMBERS = 16
CHUNK = 2**24
"""Elements that are looked at together: what that takes of memory is small beside a layer."""
ROW = 4096
"""Signs are those of an element's place in its row times that of the row."""


def _signs(first: int, count: int, device: torch.device) -> Tensor:
    """+1 or -1, by place: a multiplicative hash, of which the upper bits are mixed well."""
    places = torch.arange(first, first + count, device=device, dtype=torch.int64)
    return 1.0 - 2.0 * ((places * 2654435761 + 974711) % 4294967296 // 2147483648).double()


def sketch(values: Tensor, start: int = 0) -> Tensor:
    """(16,), float64. `start`: the place of the first element in the tensor that this is a part of: sketches of its
    parts add up to that of the whole."""
    flat = values.detach().flatten()
    if flat.numel() > CHUNK:
        chunks = range(0, flat.numel(), CHUNK)
        return torch.stack([sketch(flat[first : first + CHUNK], start + first) for first in chunks]).sum(0)
    before = start % ROW
    after = -(before + flat.numel()) % ROW
    rows = pad(flat, (before, after)).view(-1, ROW)
    signs = _signs(start // ROW, len(rows), flat.device)
    kind = torch.promote_types(flat.dtype, torch.float32)
    # Signs change no bits, and the sum is in float64: what differs between two sketches is not of their own making.
    columns = torch.sum(rows * signs.to(kind).unsqueeze(1), 0, dtype=torch.float64)
    return (columns * _signs(1 << 40, ROW, flat.device)).view(NUMBERS, -1).sum(1)
