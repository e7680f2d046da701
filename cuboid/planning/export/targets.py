"""Every target by name."""

from collections.abc import Callable

from cuboid.errors import UserError, either, nearest_names
from cuboid.planning.export import deepspeed, megatron, nanotron, torchtitan
from cuboid.planning.export.lost import Lost, Note
from cuboid.planning.plan import Plan
from cuboid.spec.model import ModelSpec

TARGETS: dict[str, Callable[[Plan], str]] = {
    "megatron": megatron.export,
    "deepspeed": deepspeed.export,
    "torchtitan": torchtitan.export,
    "nanotron": nanotron.export,
}

NOTES: dict[str, Callable[[Plan], list[Note]]] = {"megatron": megatron.notes, "torchtitan": torchtitan.notes}
"""Target -> what its files say otherwise; the others either say it or describe no model."""

MODELS: dict[str, Callable[[ModelSpec, Lost], None]] = {
    "megatron": megatron.check_model,
    "torchtitan": torchtitan.check_model,
    "nanotron": nanotron.check_model,
}
"""Target -> what its models lack; files of the others describe none."""


def refuse_model(model: ModelSpec, target: str) -> None:
    """Raises where the target has no such model, whatever the layout."""
    lost = Lost(target)
    if target in MODELS:
        MODELS[target](model, lost)
    lost.refuse()


def notes(plan: Plan, target: str) -> list[Note]:
    """Fields that the target has in its own way; its file names them."""
    return NOTES[target](plan) if target in NOTES else []


def export(plan: Plan, target: str) -> str:
    """The plan in the words of another engine."""
    if target not in TARGETS:
        near = either(f"--to {name}" for name in nearest_names(target, TARGETS, count=4))
        raise UserError(f"unknown target to={target}; use {near}, or --to hf:FOLDER for a trained model")
    return TARGETS[target](plan)
