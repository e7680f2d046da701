"""What follows from observed numbers alone, by arithmetic in float32 or wider: the norm of gradients, and what an
optimizer makes of them. In 16 bits these are known much better than the numbers themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.checkpoint.state import AVERAGE
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.training.learning_rate import learning_rate
from cuboid.verification.reference import Tensors, Trace, Updates
from cuboid.verification.rounding import Bound

NORM = 1e-3
"""How near a norm is to that of its gradients; a tensor that is counted twice is further off."""
UPDATE = 0.02
"""Of a learning rate: how near parameters are to what the optimizer makes of the gradients."""

CLIPPED = ("attention.query.bias", "attention.key.bias")
"""Of what AdamW updates, what QK-clip scales."""


def norm_of(observed: Trace) -> Bound:
    """The gradient norm beside that of the gradients themselves."""
    errors = [0.0]
    for told, gradients in zip(observed.gradient_norms, observed.gradients, strict=True):
        right = norm(gradients)
        error = abs(told - right) / right if right else abs(told)
        errors.append(error if error == error else float("inf"))
    return Bound(max(errors), NORM)


def norm(gradients: Tensors) -> float:
    return sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5


def replayed(run: Run, observed: Trace, start: Tensors) -> list[Tensors]:
    """The parameters after each step that AdamW makes of the observed gradients; empty where another optimizer has
    them, without those that another has."""
    if run.optimizer.is_own or isinstance(run.model, PythonModelSpec):
        return []
    clipped = CLIPPED if run.optimizer.qk_clip else ()  # scaled once more, behind the update
    names = [
        name
        for name, value in start.items()
        if not (run.optimizer.is_muon and value.ndim > 1) and not name.endswith(clipped)
    ]
    parameters = {name: start[name].clone().requires_grad_() for name in names}
    updates, found = Updates(run, parameters), []
    for step, gradients in enumerate(observed.gradients):
        clip = run.training.gradient_clip
        scale = min(1.0, clip / (observed.gradient_norms[step] + 1e-6)) if clip > 0 else 1.0
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].to(parameter) * scale if name in gradients else None
        updates.step(learning_rate(run.learning_rate, step, run.training.steps))
        found.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    return found


def update_bound(run: Run, observed: Trace, start: Tensors) -> Bound | None:
    """Parameters beside what AdamW makes of the observed gradients, in parts of the learning rate."""
    worst = None
    for step, expected in enumerate(replayed(run, observed, start)):
        rate = learning_rate(run.learning_rate, step, run.training.steps)
        for name, right in expected.items():
            seen = observed.parameters[step].get(name)
            if seen is None or seen.shape != right.shape or not rate or name.endswith("router.bias"):
                continue
            apart = float((seen.double() - right.double()).square().mean().sqrt())
            rounding = 2.0**-22 * float(right.abs().max())  # of what the update is added to
            error = max(apart - rounding, 0.0) / rate if apart == apart else float("inf")
            if worst is None or error > worst.error:
                worst = Bound(error, UPDATE, name)
    return worst


def replayed_averages(run: Run, observed: Trace, start: Tensors) -> list[Tensors]:
    """The averages after each step that follow from the observed parameters; empty where none are kept."""
    decay, found = run.optimizer.average, list[Tensors]()
    if not observed.averages:
        return found
    kept = {name: value.double() for name, value in start.items()}
    for parameters in observed.parameters:
        kept = {name: torch.lerp(value, parameters[name].double(), 1 - decay) for name, value in kept.items()}
        found.append({f"{AVERAGE}/{name}": value for name, value in kept.items()})
    return found


def average_bound(run: Run, observed: Trace, start: Tensors) -> Bound | None:
    """Averages beside those that follow from the observed parameters, in parts of what one step moves them."""
    worst = None
    for step, expected in enumerate(replayed_averages(run, observed, start)):
        for name, right in expected.items():
            error = average_error(run, step, observed.averages[step][name], right)
            if worst is None or error > worst.error:
                worst = Bound(error, UPDATE, name)
    return worst


def average_error(run: Run, step: int, seen: Tensor, right: Tensor) -> float:
    moves = learning_rate(run.learning_rate, step, run.training.steps) * (1 - run.optimizer.average)
    apart = float((seen.double() - right).square().mean().sqrt())
    error = max(apart - 2.0**-22 * float(right.abs().max()), 0.0) / (moves or 1.0)
    return error if apart == apart else float("inf")
