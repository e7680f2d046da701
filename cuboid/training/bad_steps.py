"""Judges each step of a training, and tells what there is to know of a bad one: its numbers, each rank's share of them,
and where its samples come from."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from cuboid.console import say
from cuboid.data.source import Source
from cuboid.errors import RankError
from cuboid.parallel.collectives import start_all_gather
from cuboid.parallel.parallelize import Engine
from cuboid.resilience.bad_steps import Judge, note_bad_step, number
from cuboid.spec.training import Batch
from cuboid.training.callbacks import Callback
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations
from cuboid.training.step import LeavesOut, PendingStep, StepResult

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer


class BadSteps(Callback):
    def __init__(self, engine: Engine, source: Source, done: int) -> None:
        self._engine, self._source = engine, source
        self._judge = Judge(engine.run, engine.course, done)
        self._retried: set[Batch] = set()

    def judge(self, trainer: Trainer, step: int) -> LeavesOut | None:
        """For a step that must be judged before its update; others are when their numbers are there."""
        if not self._judge.looks_for_spikes:
            return None
        return lambda result: self._reason(step - 1, result)

    def _reason(self, step: int, result: StepResult) -> str:
        """An overflow in fp16 is skipped too, but neither bad nor good."""
        return "" if result.overflowed else self._judge.reason(step, result.loss, result.gradient_norm)

    def on_result(self, trainer: Trainer, step: int, result: StepResult, pending: PendingStep) -> StepResult | None:
        """The result, which says why the update was skipped if it was. Raises `UserError` where the run must stop."""
        reason = result.left_out
        if not reason and not self._judge.looks_for_spikes:
            reason = self._reason(step - 1, result)
        if not reason:
            return result
        self._note(step - 1, pending, result, reason)
        self._judge.require_progress(step - 1, reason)
        if not self._may_go_back(step - 1):
            return replace(result, left_out=reason)
        self._roll_back(trainer, step)
        return None

    def _may_go_back(self, step: int) -> bool:
        """To retry a batch that was retried already is no use: it is bad itself, and skipped like a skipped one."""
        spec, batch = self._engine.run.resilience, self._engine.course.batch(step)
        return spec.goes_back and (spec.bad_steps == "rollback" or batch not in self._retried)

    def _roll_back(self, trainer: Trainer, step: int) -> None:
        """The run resumes without the batch of that step, or tries it again."""
        course = self._engine.course
        batch, skipped = course.batch(step - 1), course.skipped
        assert isinstance(batch, int)  # islands do not go back
        trainer.roll_back(step)
        if self._engine.run.resilience.bad_steps == "retry":
            self._retried.add(batch)
            again = f"to try batch {batch + 1} of the data again"
        else:
            skipped = [*skipped, batch]
            again = f"without batch {batch + 1} of the data"
        # Loading restored the skipped batches as they were then; those found bad since must stay skipped.
        for each in skipped:
            course.skip(each)
        if self._engine.groups.world.index == 0:
            say(f"step {step} is bad: back to step {trainer.done}, {again}", True)

    def _note(self, step: int, pending: PendingStep, result: StepResult, reason: str) -> None:
        world, run = self._engine.groups.world, self._engine.run
        # (ranks,): whose shards hold what is not finite, or too large.
        squares = start_all_gather(pending.own_square.reshape(1), world).wait().tolist()
        self._forget_exchanges()
        # Every rank takes part in the all-gather above; the rest is rank 0's.
        if world.index:
            return
        batch = self._engine.course.batch(step)
        # Where each sample of the batch comes from, so that bad data can be found and looked at.
        samples = []
        for position in run.training.places(batch):
            origin = self._source.origin(position)
            samples.append({"position": position, **(asdict(origin) if origin else {})})
        row = {
            "step": step + 1,
            "reason": reason,
            "action": run.resilience.bad_steps,
            "loss": number(result.loss),
            "gradient_norm": number(result.gradient_norm),
            "layout": str(run.layout),
            "squared_norms": [number(square) for square in squares],
            "batch": batch,
            "skipped": self._engine.course.skipped,
            "samples": samples,
        }
        note_bad_step(run, row)

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        """Whether replicas are compared."""
        every = self._engine.run.resilience.check_replicas_every
        return every > 0 and (step % every == 0 or trainer.checkpointer.is_due(step))

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if self.waits_for(trainer, step):
            self.compare_replicas(step, trainer.optimizer)
            trainer.start_clock()

    def compare_replicas(self, done: int, optimizer: Optimizer) -> None:
        """Raises `RankError` where copies differ: the run continues from the newest checkpoint, and none is written of
        copies that were not compared."""
        found = deviations(self._engine, optimizer)
        self._forget_exchanges()
        if not found:
            return
        if self._engine.groups.world.index == 0:
            row = {"step": done, "reason": "replicas differ", "replicas": [asdict(one) for one in found]}
            note_bad_step(self._engine.run, row)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise RankError(f"after step {done} {found[0]}{more}: a memory or a computation is at fault")

    def _forget_exchanges(self) -> None:
        if self._engine.ledger is not None:
            self._engine.ledger.take()  # no part of a step
