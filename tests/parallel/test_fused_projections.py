"""What compiled blocks compute by operations of their own is what plain ones compute, and so are the gradients."""

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.attention import Attention
from cuboid.model.feed_forward import FeedForward
from cuboid.model.linear import Norm
from cuboid.model.rope import Positions, make_positions, rotate
from cuboid.model.transformer import add_norm
from cuboid.parallel.fused_block import FusedRope, fuse_matmuls, fused_add_norm, swiglu_backward
from cuboid.parallel.parallelize import build_engine, set_parameter
from cuboid.parallel.zero import Unit
from tests.parallel.cases import small_run

RUN = small_run("dp=1", "training.precision=float32", "training.sequence=16")


def block_unit(layout: str = "dp=1") -> Unit:
    run = small_run(layout, "training.precision=float32")
    return next(unit for unit in build_engine(run, 0, torch.device("cpu")).units if unit.name == "layers.0")


def gradients(unit: Unit, output: Tensor, x: Tensor) -> dict[str, Tensor]:
    for parameter in (*unit.parameters.values(), x):
        parameter.grad = None
    output.square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in unit.parameters.items() if parameter.grad is not None}
    assert x.grad is not None
    return {**found, "x": x.grad.clone()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6 + 1e-5 * float(value.abs().max()))


@pytest.mark.parametrize("kind", ["attention", "feed_forward"])
def test_what_is_joined_computes_the_same(kind: str) -> None:
    model, unit = RUN.model, block_unit()
    module: Attention | FeedForward = Attention(model) if kind == "attention" else FeedForward(model, model.ffn)
    for name, _ in list(module.named_parameters()):
        set_parameter(module, name, unit.parameters[f"layers.0.{kind}.{name}"])
    positions = make_positions(model, 16, torch.float32, torch.device("cpu"))
    x = torch.randn(32, model.hidden, requires_grad=True)
    plain = module(x, positions)
    expected = gradients(unit, plain, x)
    fuse_matmuls(module, unit, rotates=True)
    assert module.fused is not None
    fused = module(x, positions)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    assert_same(gradients(unit, fused, x), expected)
    # No copies: the gradients of those that were joined are rows of one.
    names = ("query", "key", "value") if kind == "attention" else ("gate", "up")
    held = [unit.parameters[f"layers.0.{kind}.{name}.weight"].grad for name in names]
    assert len({gradient.untyped_storage().data_ptr() for gradient in held if gradient is not None}) == 1


@pytest.mark.parametrize("zero", [0, 3])
def test_weights_that_do_not_lie_side_by_side_stay_apart(zero: int) -> None:
    unit = block_unit(f"dp=1,zero={zero}")
    names = ("query", "key", "value", "output")
    weights = [unit.parameters[f"layers.0.attention.{name}.weight"] for name in names]
    fused = unit.side_by_side(weights[:3])
    unit.gather()
    assert fused is not None and torch.equal(fused, torch.cat(weights[:3]))
    assert unit.side_by_side([weights[0], weights[2]]) is None
    assert unit.side_by_side([weights[1], weights[0]]) is None


@pytest.mark.parametrize("joins", [False, True])
def test_a_branch_and_its_backward_pass(joins: bool) -> None:
    model = RUN.model
    norm = Norm(model, model.hidden)
    norm.weight.data.uniform_(0.5, 1.5)
    found = []
    x, other, weights = torch.randn(3, 24, model.hidden).unbind()
    for function in (add_norm, fused_add_norm):
        x, other = x.detach().requires_grad_(), other.detach().requires_grad_()
        norm.weight.grad = None
        stream, normed = function(norm, x, other if joins else None)
        (stream * weights + normed.square()).sum().backward()
        assert x.grad is not None and norm.weight.grad is not None
        found.append((stream, normed, x.grad, norm.weight.grad, other.grad if joins else x.grad))
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequences", [1, 3])
def test_rotations_go_back(sequences: int) -> None:
    """Tables of one sequence for all, or one for each."""
    fused = torch.randn(3 * 5, (4 + 2 * 2) * 8, dtype=torch.float64, requires_grad=True)
    cosine, sine = torch.randn(2, sequences, 5, 1, 8, dtype=torch.float64).unbind()
    positions = Positions(torch.empty(0), cosine, sine)
    query, key, value = fused.split([32, 16, 16], 1)
    plain = (
        rotate(query.view(3, 5, 4, 8), positions),
        rotate(key.view(3, 5, 2, 8), positions),
        value.reshape(3, 5, 2, 8),
    )
    own = FusedRope.apply(fused, cosine, sine, 4, 2)
    weights = [torch.randn_like(each) for each in plain]
    for each, expected in zip(own, plain, strict=True):
        torch.testing.assert_close(each, expected)
    found, expected = (torch.autograd.grad(three, fused, weights)[0] for three in (own, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_goes_back(dtype: torch.dtype) -> None:
    fused = torch.randn(7, 2 * 12).to(dtype).double().requires_grad_()
    gradient = torch.randn(7, 12).to(dtype)
    gate, up = fused.chunk(2, 1)
    (expected,) = torch.autograd.grad(functional.silu(gate) * up, fused, gradient.double())
    found = swiglu_backward(gradient, fused.detach().to(dtype))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
