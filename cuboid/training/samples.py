"""Text that is written during a training (`samples.every`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from cuboid.parallel.parallelize import Engine
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.callbacks import Callback

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer


class Sampler(Protocol):
    """Writes text with the weights as they are."""

    def write(self, step: int) -> None:
        """Every rank calls it, after the same steps."""


MakeSampler = Callable[[Engine, bool], Sampler]
"""From the engine that trains and whether to be quiet. Who starts a rank passes it, so that a training knows nothing of
generation."""


class Samples(Callback):
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return trainer.run.samples.is_due(step)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if self.waits_for(trainer, step) and not trainer.stops:
            HEARTBEAT.enter("evaluation")
            self._sampler.write(step)
            trainer.start_clock()
