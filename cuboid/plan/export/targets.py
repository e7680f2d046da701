"""Every target by name."""

from collections.abc import Callable

from cuboid.errors import UserError
from cuboid.plan.export import deepspeed, megatron, nanotron, torchtitan
from cuboid.plan.plan import Plan
from cuboid.spec.suggest import either, nearest_names

TARGETS: dict[str, Callable[[Plan], str]] = {
    "megatron": megatron.export,
    "deepspeed": deepspeed.export,
    "torchtitan": torchtitan.export,
    "nanotron": nanotron.export,
}


def export(plan: Plan, target: str) -> str:
    """The plan in the words of another engine."""
    if target not in TARGETS:
        near = either(f"--to {name}" for name in nearest_names(target, TARGETS, count=4))
        raise UserError(f"unknown target to={target}; use {near}, or --to hf:FOLDER for a trained model")
    return TARGETS[target](plan)
