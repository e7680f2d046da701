"""Callbacks: what is called at the named moments of a training, on every rank. Metrics, memory, profiles, bad steps,
checkpoints and samples are callbacks too; those of one's own come after them.

class Watch(Callback):
    def on_step(self, trainer, step, result):
        if trainer.rank == 0 and step % 100 == 0:
            print(step, result.loss)

[training]
callbacks = "python:my_callbacks.py:Watch"      # commas between several"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

from cuboid.errors import UserError
from cuboid.spec.plugin import PREFIX, is_plugin, load_plugin, resolve_here

if TYPE_CHECKING:
    from cuboid.checkpoint.save import SaveReport
    from cuboid.training.step import LeavesOut, PendingStep, StepResult
    from cuboid.training.trainer import Trainer


class Callback:
    """Override what you need, in the order of their moments here. Every rank has its own, and calls it at the same
    moments; steps count from 1."""

    def __enter__(self) -> Self:
        """Once the trainer is set up."""
        return self

    def __exit__(self, *error: object) -> None:
        """When the training has ended, also by an error."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, when the state is that of the newest checkpoint or the first weights."""

    def around_step(self, trainer: Trainer, step: int) -> AbstractContextManager[object]:
        """Entered while a step is computed; on a GPU, while it is queued."""
        return nullcontext()

    def judge(self, trainer: Trainer, step: int) -> LeavesOut | None:
        """What looks at a step's numbers before its update and says why to skip that, or "". A step with a judge waits
        for its numbers."""
        return None

    def on_result(self, trainer: Trainer, step: int, result: StepResult, pending: PendingStep) -> StepResult | None:
        """When a step's numbers are known, before anything is made of them: what the other moments see of them. None:
        the run went back to before this step (`trainer.roll_back`)."""
        return result

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        """After a step's numbers are known. On a GPU the next one has begun."""

    def on_evaluation(self, trainer: Trainer, step: int, loss: float) -> None:
        """After an evaluation, with its loss."""

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        """Whether `on_step_end` needs the state after this very step: a GPU does not begin the next one before."""
        return False

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Between two steps. Who takes long calls `trainer.start_clock()` after it: it is no part of a step."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """After a save has begun. It may still be written."""

    def on_saved(self, trainer: Trainer, saves: Sequence[SaveReport]) -> None:
        """After saves have ended."""

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        """After the run went back to the state after `step`."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, when all that was saved is written."""


def named_callbacks(names: str) -> list[str]:
    """What `training.callbacks` names, each with its whole path. Nothing is imported."""
    found = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        if not is_plugin(name):
            raise UserError(f"training.callbacks={name} names no class; write it like {PREFIX}my_callbacks.py:Watch")
        found.append(resolve_here(name, "training.callbacks"))
    return found


def load_callbacks(names: str) -> list[Callback]:
    """One of each class that `training.callbacks` names."""
    return [made() for made in callback_classes(names)]


def callback_classes(names: str) -> list[type[Callback]]:
    """The classes, imported; one that is no callback is refused."""
    found = []
    for name in named_callbacks(names):
        made = load_plugin(name, "training.callbacks")
        if not isinstance(made, type) or not issubclass(made, Callback):
            raise UserError(f"training.callbacks={name} is no cuboid.Callback; derive it from that")
        found.append(made)
    return found
