"""An island's part in a training: its batches, its rounds, and what rows tell of them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch

from cuboid.console import say
from cuboid.islands.outer import OuterState
from cuboid.islands.sync import Islands, Site, Synchronised
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.parallelize import Engine
from cuboid.spec.training import Batch
from cuboid.training.callbacks import Callback
from cuboid.training.step import PendingStep, StepResult

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer


class IslandRounds(Callback):
    """Every rank of the island makes one, once the state is that of the newest checkpoint or the first weights."""

    def __init__(self, engine: Engine, outer: OuterState, site: Site, done: int, quiet: bool) -> None:
        self._engine, self._quiet = engine, quiet or engine.groups.world.index > 0
        past = engine.course.islands
        if not past:
            outer.begin()
        self.islands = Islands(outer, site, past, done)
        self._told: dict[str, Any] = {}
        self._sent = 0

    def __exit__(self, *error: object) -> None:
        self.islands.close(for_good=error[0] is None)

    def on_start(self, trainer: Trainer) -> None:
        begun = trainer.done
        trainer.done = self.islands.enter(begun)
        if trainer.done != begun and not self._quiet:
            say(f"the other islands are at step {trainer.done}: this one continues there, with the outer weights")

    def next_batch(self, step: int) -> Batch:
        """Of the global order; `step` counts from 0."""
        course = self._engine.course
        if step not in course.taken:
            course.taken = {**dict(list(course.taken.items())[-4:]), step: self.islands.next_batch(step)}
        return course.taken[step]

    def on_result(self, trainer: Trainer, step: int, result: StepResult, pending: PendingStep) -> StepResult:
        if result.is_finite and not result.left_out:
            self.islands.count(result.tokens)
        told, self._told = self._told, {}
        return replace(result, islands=told or None)

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return self.islands.is_due(step)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if self.islands.is_due(step):
            trainer.checkpointer.before_update()  # a save may still copy what is about to change
            trainer.done, found = self.islands.after(step)
            self._note(step, trainer.done, found)
            if self._engine.ledger is not None:
                self._engine.ledger.take()  # no part of a step
            trainer.start_clock()
        if trainer.checkpointer.keeps_after(trainer.done):
            self.settle()

    def settle(self) -> None:
        """Before a save."""
        self._engine.course.islands = self.islands.settle()

    def _note(self, step: int, later: int, found: list[Synchronised]) -> None:
        """For the row of the next step."""
        if not found:
            return
        sums = torch.tensor([[each.square, each.spread] for each in found], dtype=torch.float64)
        sums = all_reduce(sums.to(self._engine.device), self._engine.groups.world).cpu()
        latest = found[-1]
        missing = sorted(self.islands.known - latest.members.keys())
        self._told = {
            "island": self.islands.site.number,
            "round": latest.round,
            "islands": len(latest.members),
            "waited": round(sum(each.waited for each in found), 4),
            "outer_gradient_norm": sqrt(float(sums[:, 0].sum())),
            "drift": sqrt(float(sums[:, 1].sum())),
            "sent_bytes": self.islands.counts.sent - self._sent,
            "lag": later - step,
        }
        self._sent = self.islands.counts.sent
        if not self._quiet and later > step:
            say(f"step {step}: the other islands went ahead without this one; it continues after step {later}", True)
        elif not self._quiet and missing and self.islands.run.output.is_logged(step, self._engine.run.training.steps):
            say(f"step {step}: round {latest.round} without island {', '.join(map(str, missing))}", True)
