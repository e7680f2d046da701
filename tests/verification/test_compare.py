"""The comparison must be able to fail: every kind of difference is seen."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from cuboid.cli.verify import verification_run
from cuboid.spec.run import Run
from cuboid.verification.compare import compare, relative_error, tensor_error
from cuboid.verification.reference import Trace, reference_trace


@pytest.fixture(scope="module")
def run() -> Run:
    small = ("model.layers=2", "model.hidden=16", "model.ffn=24", "training.sequence=4", "training.global_batch=2")
    return verification_run("dp=1", overrides=small, steps=2)


@pytest.fixture(scope="module")
def reference(run: Run) -> Trace:
    return reference_trace(run)


def test_a_trace_equals_itself(run: Run, reference: Trace) -> None:
    verdict = compare(run, copy.deepcopy(reference), reference)
    assert verdict.passed
    assert (verdict.loss_error, verdict.gradient_error, verdict.gradient_norm_error, verdict.parameter_error) == (
        0,
    ) * 4


def test_the_reference_is_reproducible_and_complete(run: Run, reference: Trace) -> None:
    again = reference_trace(run)
    assert compare(run, again, reference).gradient_error == 0
    assert len(again.losses) == len(again.gradients) == len(again.parameters) == run.training.steps
    assert sum(tensor.numel() for tensor in again.parameters[0].values()) == run.model.parameters
    assert again.gradients[0].keys() == again.parameters[0].keys()
    total = torch.cat([tensor.flatten() for tensor in again.gradients[1].values()]).norm().item()
    assert again.gradient_norms[1] == pytest.approx(total, rel=1e-12)


def scale(tensors: dict[str, torch.Tensor], name: str, factor: float) -> None:
    tensors[name] = tensors[name] * factor


def disturb_one_element(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.feed_forward.down.weight"][3, 5] += (
        1e-6 * tensors["layers.1.feed_forward.down.weight"].abs().max()
    )


DISTURBANCES: dict[str, tuple[str, Callable[[Trace], object]]] = {
    "a gradient scaled, in the last step": (
        "gradient_error",
        lambda trace: scale(trace.gradients[1], "head.output.weight", 1 + 1e-8),
    ),
    "a mean in place of a sum": (
        "gradient_error",
        lambda trace: scale(trace.gradients[0], "embedding.tokens.weight", 0.5),
    ),
    "one element of a gradient": ("gradient_error", lambda trace: disturb_one_element(trace.gradients[0])),
    "a gradient of the wrong sign": ("gradient_error", lambda trace: scale(trace.gradients[0], "head.norm.weight", -1)),
    "a gradient that is not a number": (
        "gradient_error",
        lambda trace: scale(trace.gradients[0], "layers.0.attention.query.weight", math.nan),
    ),
    "a missing gradient": ("gradient_error", lambda trace: trace.gradients[0].pop("head.output.weight")),
    "a tensor too many": (
        "gradient_error",
        lambda trace: trace.gradients[0].update({"padding": torch.zeros(1, dtype=torch.float64)}),
    ),
    "a wrong norm": (
        "gradient_norm_error",
        lambda trace: trace.gradient_norms.__setitem__(0, trace.gradient_norms[0] * 1.01),
    ),
    "a norm that is not a number": ("gradient_norm_error", lambda trace: trace.gradient_norms.__setitem__(1, math.nan)),
    "a wrong loss": ("loss_error", lambda trace: trace.losses.__setitem__(1, trace.losses[1] + 1e-7)),
    "a loss that is not a number": ("loss_error", lambda trace: trace.losses.__setitem__(1, math.nan)),
    "a wrong parameter": ("parameter_error", lambda trace: disturb_one_element(trace.parameters[1])),
    "a missing parameter": (
        "parameter_error",
        lambda trace: trace.parameters[1].pop("layers.0.feed_forward.up.weight"),
    ),
}


@pytest.mark.parametrize("kind", DISTURBANCES)
def test_a_difference_is_found_and_only_where_it_is(run: Run, reference: Trace, kind: str) -> None:
    field, disturb = DISTURBANCES[kind]
    observed = copy.deepcopy(reference)
    disturb(observed)
    verdict = compare(run, observed, reference)
    assert not verdict.passed
    errors = {name: getattr(verdict, name) for name in vars(verdict) if name.endswith("_error")}
    assert errors.pop(field) > verdict.tolerance
    assert set(errors.values()) == {0.0, None}, "there are no routers"


def test_the_worst_tensor_is_named(run: Run, reference: Trace) -> None:
    observed = copy.deepcopy(reference)
    scale(observed.gradients[0], "head.output.weight", 1.001)
    scale(observed.gradients[1], "layers.1.attention.key.weight", 1.01)
    scale(observed.parameters[1], "head.norm.weight", 1.01)
    verdict = compare(run, observed, reference)
    assert (verdict.worst_gradient, verdict.worst_parameter) == ("layers.1.attention.key.weight", "head.norm.weight")
    assert verdict.gradient_error == pytest.approx(0.01)
    observed.gradients[0].pop("head.output.weight")
    assert compare(run, observed, reference).worst_gradient == "head.output.weight is held by one side only"


def test_fewer_steps_are_no_proof(run: Run, reference: Trace) -> None:
    observed = copy.deepcopy(reference)
    observed.losses.pop()
    with pytest.raises(ValueError, match="longer"):
        compare(run, observed, reference)


@pytest.mark.parametrize(
    ("value", "expected", "error"),
    [
        (1.0, 1.0, 0.0),
        (1.1, 1.0, 0.1),
        (0.0, 0.0, 0.0),
        (0.5, 0.0, 0.5),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
    ],
)
def test_relative_error(value: float, expected: float, error: float) -> None:
    assert relative_error(value, expected) == pytest.approx(error)


def test_tensor_error() -> None:
    ones = torch.ones(3)
    assert tensor_error(ones, ones, 0.0) == 0
    assert tensor_error(torch.ones(2), ones, 0.0) == math.inf
    assert tensor_error(torch.tensor([1.0, 1.0, math.nan]), ones, 0.0) == math.inf
    assert tensor_error(torch.tensor([1e-9]), torch.zeros(1), 1e-3) == pytest.approx(1e-6)
    assert tensor_error(torch.zeros(1), torch.zeros(1), 0.0) == 0
