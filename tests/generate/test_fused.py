"""A fused matmul is the matmuls it is made of, and what is loaded into these later is in it."""

from __future__ import annotations

import pytest
import torch

from cuboid.generate.build import fuse
from cuboid.model.linear import Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns_together", [True, False])
def test_parts_are_filled_after_they_are_fused(bias: bool, columns_together: bool) -> None:
    matmuls = [Linear(6, rows, bias) for rows in (8, 4, 4)]
    for matmul in matmuls:
        matmul.requires_grad_(False)
        if columns_together:
            matmul.weight.data = matmul.weight.data.t().contiguous().t()
    fused = fuse(matmuls)
    assert (fused.weight.stride(0) == 1) == columns_together
    generator = torch.Generator().manual_seed(0)
    for matmul in matmuls:
        for parameter in matmul.parameters():
            parameter.data.normal_(generator=generator)
    x = torch.randn(3, 6, generator=generator)
    apart = torch.cat([matmul(x) for matmul in matmuls], 1)
    torch.testing.assert_close(fused(x), apart)
    assert (fused.bias is None) != bias
