"""Matmuls of 16-bit numbers in float32: rounded once, forward and backward."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.cpu_16bit import Float32Matmuls, fast_matmuls
from cuboid.launch.pool import Pool

KINDS = [torch.bfloat16, torch.float16]


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", KINDS)
def test_matmuls_are_those_of_float32_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = leaves(dtype, (5, 300), (7, 300), (7,))
    with Float32Matmuls():
        matmul = functional.linear(x, weight, bias)
        matmul.sum().backward()
        batched = torch.bmm(x.detach().expand(2, 5, 300), weight.detach().t().expand(2, 300, 7))
    exact = functional.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(matmul, exact.to(dtype))
    assert torch.equal(batched[1], (x.float() @ weight.float().t()).to(dtype))
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, (torch.ones(5, 7) @ weight.float()).to(dtype))
    assert torch.equal(weight.grad, (torch.ones(7, 5) @ x.float()).to(dtype))


@pytest.mark.parametrize("dtype", KINDS)
def test_attention_keeps_its_kinds(dtype: torch.dtype) -> None:
    given = leaves(dtype, *[(1, 2, 9, 16)] * 3)
    exact = [x.detach().float().requires_grad_() for x in given]
    with Float32Matmuls():
        seen = functional.scaled_dot_product_attention(*given, is_causal=True)
        seen.square().sum().backward()
    wanted = functional.scaled_dot_product_attention(*exact, is_causal=True)
    assert torch.equal(seen, wanted.to(dtype))
    wanted.square().sum().backward()
    for x, y in zip(given, exact, strict=True):
        assert x.grad is not None and x.grad.dtype == dtype and y.grad is not None
        torch.testing.assert_close(x.grad.float(), y.grad, rtol=0.05, atol=0.05)


def test_a_cpu_without_them_needs_no_warning(pool: Pool) -> None:
    assert pool.run("tests.model.test_cpu_16bit:warned", ranks=1) == [[]]


def warned(_: int) -> list[str]:
    """In a rank, because pytest has filters of its own."""
    with warnings.catch_warnings(record=True) as caught:
        functional.linear(*leaves(torch.bfloat16, (64, 64), (128, 64)))
    return [str(warning.message) for warning in caught]


def test_other_numbers_and_devices_stay_as_they_are() -> None:
    for device, precision in (("cpu", "float32"), ("cpu", "float64"), ("cpu", "fp8"), ("cuda", "bf16")):
        assert isinstance(fast_matmuls(torch.device(device), precision), nullcontext)
    with Float32Matmuls():
        assert (torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64
