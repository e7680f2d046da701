"""Callbacks of one's own: what is called at the named moments of a training, on every rank.

class Watch(Callback):
    def on_step(self, trainer, step, result):
        if trainer.rank == 0 and step % 100 == 0:
            print(step, result.loss)

[training]
callbacks = "python:my_callbacks.py:Watch"      # commas between several"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuboid.errors import UserError
from cuboid.spec.plugin import PREFIX, is_plugin, load_plugin, resolve_here

if TYPE_CHECKING:
    from cuboid.training.step import StepResult
    from cuboid.training.trainer import Trainer


class Callback:
    """Override what you need. Every rank has its own, and calls it at the same moments; steps count from 1."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, when the state is that of the newest checkpoint or the first weights."""

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        """After a step's numbers are known. On a GPU the next one has begun."""

    def on_evaluation(self, trainer: Trainer, step: int, loss: float) -> None:
        """After an evaluation, with its loss."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """After a save has begun. It may still be written."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, when all that was saved is written."""


def load_callbacks(names: str) -> list[Callback]:
    """One of each class that `training.callbacks` names."""
    found = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        if not is_plugin(name):
            raise UserError(f"training.callbacks={name} names no class; write it like {PREFIX}my_callbacks.py:Watch")
        made = load_plugin(resolve_here(name, "training.callbacks"), "training.callbacks")()
        if not isinstance(made, Callback):
            raise UserError(f"training.callbacks={name} is no cuboid.Callback; derive it from that")
        found.append(made)
    return found
