"""Rotary positions against the formula on complex numbers."""

import math

import pytest
import torch

from cuboid.model.rope import make_positions, rotate
from cuboid.spec.model import ModelSpec, RopeScaling

CPU = torch.device("cpu")
SCALING = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=64)


def make_model(scaling: RopeScaling | None = None) -> ModelSpec:
    return ModelSpec(hidden=32, layers=1, heads=2, ffn=8, vocab=5, rope_theta=500.0, rope_scaling=scaling)


def frequency(model: ModelSpec, pair: int) -> float:
    """Radians per position of the pair-th rotation, in plain arithmetic, as Llama 3 describes it."""
    plain = model.rope_theta ** (-2 * pair / model.head_dim)
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    kept = min(1.0, max(0.0, kept))
    return kept * plain + (1 - kept) * plain / scaling.factor


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_each_pair_is_a_complex_number_turned_by_its_position(scaling: RopeScaling | None) -> None:
    model = make_model(scaling)
    length, half = 50, model.head_dim // 2
    x = torch.randn(2, length, 3, model.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, make_positions(model, length, torch.float64, CPU))
    pairs = torch.complex(x[..., :half], x[..., half:])
    frequencies = torch.tensor([frequency(model, pair) for pair in range(half)], dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] * frequencies
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    # The tables are float32, so angles up to 50 radians carry errors of a few 1e-6.
    assert torch.allclose(torch.cat((expected.real, expected.imag), dim=-1), turned, atol=3e-5, rtol=0)


def test_scaling_keeps_blends_and_slows() -> None:
    plain, scaled = make_model(), make_model(SCALING)
    ratios = [frequency(scaled, pair) / frequency(plain, pair) for pair in range(8)]
    assert ratios[0] == 1
    assert any(1 / 8 < ratio < 1 for ratio in ratios)
    assert ratios[-1] == 1 / 8


def test_matmuls_depend_on_the_distance_only() -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, model.head_dim, dtype=torch.float64, generator=generator)
    positions = make_positions(model, 20, torch.float64, CPU)
    queries = rotate(query.expand(1, 20, 1, -1), positions)[0, :, 0]
    keys = rotate(key.expand(1, 20, 1, -1), positions)[0, :, 0]
    matmuls = queries @ keys.T
    for distance in range(20):
        diagonal = torch.diagonal(matmuls, offset=-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4, rtol=0)
    assert (matmuls[0] - matmuls[0, 0]).abs().max() > 0.1


def test_learned_positions_turn_nothing() -> None:
    model = ModelSpec(hidden=32, layers=1, heads=2, ffn=8, vocab=5, positions="learned")
    positions = make_positions(model, 7, torch.float32, CPU)
    x = torch.randn(1, 7, 2, 16)
    assert rotate(x, positions) is x
