"""The transpose of an fp8 matrix as one custom operation: Inductor neither fuses it with others nor repeats it in the
backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation

TILE = 64


@operation("cuboid::transpose")
def transpose(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.t().contiguous()
    from cuboid.kernels.transpose_kernel import transpose_tiles

    rows, columns = x.shape
    result = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    grid = (-(-rows // TILE), -(-columns // TILE))
    transpose_tiles[grid](x.view(torch.int8), result.view(torch.int8), rows, columns, TILE=TILE)
    return result


@torch.library.register_fake("cuboid::transpose")  # type: ignore[untyped-decorator]
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])
