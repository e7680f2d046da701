"""A float32 number kept as a bf16 number and 16 bits more."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.kernels.precision import join_halves, split_halves


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_nothing_is_lost(patterns: list[int]) -> None:
    values = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3e38)]
    near, rest = split_halves(values)
    assert torch.equal(join_halves(near, rest).view(torch.int32), values.view(torch.int32))


def test_the_near_half_is_the_nearest_bf16_number() -> None:
    values = torch.randn(100_000) * torch.logspace(-20, 20, 100_000)
    values = values[values.view(torch.int32) & 0xFFFF != 0x8000]  # no ties, which go another way
    near, _ = split_halves(values)
    assert torch.equal(near.view(torch.bfloat16), values.to(torch.bfloat16))
