"""A sketch of a sum is the sum of sketches, on whole tensors and on parts of them, and every element counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.training.checks.sketch import NUMBERS, ROW, sketch


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3 * ROW), st.data())
def test_sketches_of_parts_add_up(size: int, data: st.DataObject) -> None:
    x = torch.randn(size, dtype=torch.float64)
    cut = data.draw(st.integers(0, size))
    torch.testing.assert_close(sketch(x[:cut]) + sketch(x[cut:], cut), sketch(x))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9 * ROW), st.integers(2, 4), st.data())
def test_sketches_of_parts_add_up_where_few_rows_count(size: int, stride: int, data: st.DataObject) -> None:
    x = torch.randn(size, dtype=torch.float64)
    cut = data.draw(st.integers(0, size))
    torch.testing.assert_close(sketch(x[:cut], 0, stride) + sketch(x[cut:], cut, stride), sketch(x, 0, stride))
    counted = torch.arange(size) // ROW % stride == 0
    torch.testing.assert_close(sketch(x, 0, stride).norm(), sketch(x * counted, 0, stride).norm())


def test_a_sketch_is_linear_and_as_large_as_what_it_is_of() -> None:
    x, y = torch.randn(2, 50_000, dtype=torch.float64)
    torch.testing.assert_close(sketch(x) + 2 * sketch(y), sketch(x + 2 * y))
    assert 0.3 < float(sketch(x).norm() / x.norm()) < 3


@pytest.mark.parametrize("place", [0, 1, ROW - 1, ROW, 2 * ROW + 17])
def test_every_element_counts_once(place: int) -> None:
    x = torch.zeros(3 * ROW)
    x[place] = 3.0
    found = sketch(x)
    assert found.shape == (NUMBERS,) and sorted(found.abs().tolist())[-2:] == [0.0, 3.0]
