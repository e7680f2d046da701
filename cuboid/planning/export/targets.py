"""Every target by name."""

from collections.abc import Callable

from cuboid.errors import UserError, either, nearest_names
from cuboid.planning.export import deepspeed, megatron, nanotron, torchtitan
from cuboid.planning.export.lost import Note
from cuboid.planning.plan import Plan

TARGETS: dict[str, Callable[[Plan], str]] = {
    "megatron": megatron.export,
    "deepspeed": deepspeed.export,
    "torchtitan": torchtitan.export,
    "nanotron": nanotron.export,
}

NOTES: dict[str, Callable[[Plan], list[Note]]] = {"megatron": megatron.notes, "torchtitan": torchtitan.notes}
"""Target -> what its files say otherwise; the others either say it or describe no model."""


def notes(plan: Plan, target: str) -> list[Note]:
    """Fields that the target has in its own way; its file names them."""
    return NOTES[target](plan) if target in NOTES else []


def export(plan: Plan, target: str) -> str:
    """The plan in the words of another engine."""
    if target not in TARGETS:
        near = either(f"--to {name}" for name in nearest_names(target, TARGETS, count=4))
        raise UserError(f"unknown target to={target}; use {near}, or --to hf:FOLDER for a trained model")
    return TARGETS[target](plan)
