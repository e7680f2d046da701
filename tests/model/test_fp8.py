"""Matmuls in fp8: beside torch's own kernel, beside exact ones, and compiled into one graph with their block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.model.fp8 import Fp8Matmul, Scaling, multiply, quantise, quantise_columns, require_fp8
from cuboid.model.fp8_experts import (
    fp8_grouped_matmul,
    multiply_experts_in_fp8,
    quantise_long,
    quantise_pair,
    quantise_transposes,
)
from cuboid.model.moe import Experts, grouped_matmul
from cuboid.model.router import keep_rounded, take_rounded
from cuboid.model.split_backward import Deferral, deferrable_grouped_matmul
from cuboid.spec.run import build_run

TENSOR, ROW = False, True
SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "block")


def numbers(rows: int, columns: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """`spread`: how many powers of ten apart the sizes of rows are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * 10 ** (spread * torch.rand(rows, 1, generator=generator))


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("by_row", [TENSOR, ROW])
def test_the_emulated_matmul_is_that_of_torch(by_row: bool) -> None:
    a, a_scale = quantise(numbers(32, 64), torch.float8_e4m3fn, by_row)
    b, b_scale = quantise(numbers(48, 64, 1), torch.float8_e4m3fn, by_row)
    columns = b_scale.t().contiguous() if by_row else b_scale
    expected = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=columns, out_dtype=torch.bfloat16)
    found = multiply(a, a_scale, b, b_scale, torch.bfloat16, fast=False)
    assert found.dtype == torch.bfloat16
    assert error(found.float(), expected.float()) < 2e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_three_matmuls_are_close_to_exact_ones(scaling: Scaling) -> None:
    x, weight = numbers(64, 32).requires_grad_(), numbers(48, 32, 1).requires_grad_()
    bias, gradient = numbers(1, 48, 2)[0].requires_grad_(), 1e-9 * numbers(64, 48, 3)
    y = Fp8Matmul(scaling)(x, weight, bias)
    y.backward(gradient)
    found = [y.detach(), x.grad, weight.grad, bias.grad]
    expected = [x @ weight.t() + bias, gradient @ weight, gradient.t() @ x, gradient.sum(0)]
    limits = (
        [0.05, 0.05, 0.05, 1e-6] if scaling != "tensor" else [0.05, 0.09, 0.09, 1e-6]
    )  # e5m2 has a bit less than e4m3
    for one, exact, limit in zip(found, expected, limits, strict=True):
        assert one is not None
        assert error(one, exact.detach()) < limit


def test_rows_of_different_sizes_need_scales_of_their_own() -> None:
    x, weight = numbers(64, 32, spread=6), numbers(48, 32, 1)
    exact = x @ weight.t()
    smallest = x.abs().amax(1).argsort()[:4]

    def small_rows(scaling: Scaling) -> float:
        return error(Fp8Matmul(scaling)(x, weight, None)[smallest], exact[smallest])

    assert small_rows("row") < 0.05
    assert small_rows("block") < 0.05
    assert small_rows("tensor") > 0.5


@pytest.mark.parametrize("by_row", [TENSOR, ROW])
def test_columns_are_the_transpose_with_scales_along_the_other_dimension(by_row: bool) -> None:
    x = numbers(32, 16, spread=2)
    values, scale = quantise_columns(x, torch.float8_e4m3fn, by_row)
    assert values.shape == (16, 32) and values.is_contiguous()
    assert scale.shape == ((16, 1) if by_row else ())
    assert error(values.float() * scale, x.t()) < 0.05


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zero_and_what_is_not_finite_shows(scaling: Scaling) -> None:
    assert not Fp8Matmul(scaling)(torch.zeros(16, 16), numbers(16, 16), None).any()
    for broken in (torch.inf, torch.nan):
        x = numbers(16, 16)
        x[3, 5] = broken
        assert not Fp8Matmul(scaling)(x, numbers(16, 16, 1), None).isfinite().all()


@pytest.mark.parametrize("by_row", [TENSOR, ROW])
def test_what_was_rounded_is_not_rounded_again(by_row: bool) -> None:
    """And nothing needs to be clamped: the peak stays within the format whatever its size."""
    for seed in range(20):
        x = numbers(16, 64, seed, spread=30) * 1e-12
        values, scale = quantise(x, torch.float8_e5m2, by_row)
        assert values.float().isfinite().all()
        once = values.float() * scale
        assert torch.equal(once, once.bfloat16().float()), "scales are powers of two"
        again, same = quantise(once, torch.float8_e5m2, by_row)
        assert torch.equal(again.float() * same, once)


def test_dimensions_that_do_not_divide_are_refused() -> None:
    def refusal(**changes: object) -> str:
        shape = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 256, **changes}
        layout = shape.pop("layout", "dp=1")
        training = {"precision": "fp8", "global_batch": 4, "sequence": shape.pop("sequence", 64)}
        with pytest.raises(UserError) as caught:
            build_run({"model": shape, "layout": layout, "training": training})
        return str(caught.value)

    assert refusal(ffn=200) == "training.precision=fp8 needs ffn=200 to divide by 16; use training.precision=bf16"
    several = refusal(layout="tp=4", heads=8, kv_heads=4, head_dim=8)
    assert several.startswith("training.precision=fp8 needs kv_heads × head_dim / tp=4=8")
    assert "a smaller tp than 4" in several
    assert refusal(sequence=40).endswith("= 40 does not divide by it; use training.sequence=32 or training.sequence=48")


def test_a_cpu_needs_no_fp8_hardware() -> None:
    require_fp8(torch.device("cpu"), "block")


def test_experts_in_fp8_are_close_to_exact_ones() -> None:
    """Forward and input gradient; the weight gradient is that of 16 bits. One expert has no token at all."""
    counts = torch.tensor([5, 0, 11])
    x, weight = numbers(20, 32, spread=4).requires_grad_(), numbers(3 * 48, 32, 1).view(3, 48, 32).requires_grad_()
    gradient = numbers(20, 48, 2)
    gradient[16:] = 0
    found = []
    for matmul in (grouped_matmul, deferrable_grouped_matmul(Deferral(), fp8_grouped_matmul)):
        x.grad = weight.grad = None
        y = matmul(x, weight, counts)
        y.backward(gradient)
        found.append([y.detach(), x.grad, weight.grad])
    for exact, rounded, most in zip(*found, [0.05, 0.05, 1e-6], strict=True):
        assert error(rounded[:16], exact[:16]) < most
        assert most < 1e-5 or not torch.equal(rounded, exact)


def test_gate_and_up_in_fp8_are_one_matmul_with_what_is_kept_of_two() -> None:
    """A scale for each row of the result's gradient is that of both halves; all else is rounded as one by one."""
    run = build_run({"model": "tiny-mixtral"})
    alone, joint = (Experts(run.model, 3, 48) for _ in range(2))
    for number, (left, right) in enumerate(zip(alone.parameters(), joint.parameters(), strict=True)):
        left.data = numbers(3 * left.shape[1], left.shape[2], number).view_as(left) / 8
        right.data = left.data.clone()
    deferral = Deferral()
    alone.matmul = deferrable_grouped_matmul(deferral, fp8_grouped_matmul)
    multiply_experts_in_fp8(joint, deferral)
    counts, found = torch.tensor([5, 0, 11]), []
    for experts in (alone, joint):
        for waits in (False, True):
            deferral.active = waits
            x = numbers(16, run.model.hidden, 7, spread=2).requires_grad_()
            for weight in experts.parameters():
                weight.grad = None
            y = experts(x, counts)
            y.backward(numbers(16, run.model.hidden, 8))
            for works in deferral.take().values():
                for work in works:
                    work()
            found.append([y.detach(), x.grad, *(weight.grad for weight in experts.parameters())])
    apart, later, both, both_later = found
    for one, other in ((apart, later), (both, both_later)):
        assert all(map(torch.equal, one, other))
    assert torch.equal(apart[0], both[0])
    assert error(both[1], apart[1]) < 0.05
    assert all(error(one, other) < 1e-6 for one, other in zip(both[2:], apart[2:], strict=True))


def test_a_pair_of_weights_is_rounded_as_one_below_the_other() -> None:
    gate, up = (numbers(3 * 48, 32, seed).view(3, 48, 32) for seed in (0, 1))
    both = torch.cat([gate, up], 1)
    pair, whole = quantise_pair(gate, up), quantise_long(both)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(pair, whole, strict=True))
    # Transposed, an expert has one scale: the largest of its rows, whether they are known or not.
    for scales in (None, pair[1]):
        values, each = quantise_transposes((gate, up), scales)
        assert values.shape == (3, 32, 96) and torch.equal(each, pair[1].amax(1, keepdim=True).expand(3, 32))
        assert error(values.float() * each.unsqueeze(2), both.transpose(1, 2)) < 0.03


def test_what_is_rounded_stays_with_its_rows_until_it_is_taken_once() -> None:
    """Forward and backward: autograd hands on the tensors themselves, so nothing is rounded twice."""
    x, other = numbers(4, 8).requires_grad_(), quantise_long(numbers(4, 8))
    found = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(context: object, rows: torch.Tensor) -> torch.Tensor:
            found.append(take_rounded(rows))
            return rows * 2

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
            found.append(take_rounded(gradient))
            return gradient

    class Makes(torch.autograd.Function):
        @staticmethod
        def forward(context: object, rows: torch.Tensor) -> torch.Tensor:
            return keep_rounded(rows * 2, other)

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
            return keep_rounded(gradient * 2, other)

    made = Makes.apply(x)
    Makes.apply(Reads.apply(made)).sum().backward()
    assert all(each is other for each in found) and len(found) == 2
    assert take_rounded(made) is None


def test_what_asks_for_fp8_experts_in_vain_is_refused() -> None:
    shape = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 256}

    def refusal(precision: str, **changes: object) -> str:
        with pytest.raises(UserError) as caught:
            build_run({"model": {**shape, **changes}, "training": {"precision": precision, "fp8_experts": True}})
        return str(caught.value)

    assert refusal("bf16").endswith("use precision=fp8 or fp8_experts=false")
    assert refusal("fp8").endswith("has none; use fp8_experts=false")
    narrow = {"experts": 4, "top_k": 2, "expert_ffn": 24}
    assert "needs mixture.expert_ffn=24 to divide by 16" in refusal("fp8", mixture=narrow)
