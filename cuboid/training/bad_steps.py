"""Judges each step of a training, and tells what there is to know of a bad one: its numbers, each rank's share of them,
and where its samples come from."""

from __future__ import annotations

from dataclasses import asdict, replace

from cuboid.data.source import Source
from cuboid.errors import RankError
from cuboid.parallel.collectives import start_all_gather
from cuboid.parallel.parallelize import Engine
from cuboid.resilience.bad_steps import Judge, note_bad_step, number
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations
from cuboid.training.step import LeavesOut, PendingStep, StepResult


class BadSteps:
    """Every rank makes one and calls the same methods in the same order."""

    def __init__(self, engine: Engine, source: Source, done: int) -> None:
        self._engine, self._source = engine, source
        self._judge = Judge(engine.run, engine.course, done)

    def before_update(self, step: int) -> LeavesOut | None:
        """For a step that must be judged before its update; others are when their numbers are there."""
        if not self._judge.looks_for_spikes:
            return None
        return lambda result: self._reason(step, result)

    def _reason(self, step: int, result: StepResult) -> str:
        """An overflow in fp16 is skipped too, but neither bad nor good."""
        return "" if result.overflowed else self._judge.reason(step, result.loss, result.gradient_norm)

    def judged(self, step: int, pending: PendingStep, result: StepResult) -> StepResult:
        """The result, which says why the update was skipped if it was. Raises `UserError` where the run must stop."""
        reason = result.left_out
        if not self._judge.looks_for_spikes:
            reason = self._reason(step, result)
        if not reason:
            return result
        self._note(step, pending, result, reason)
        self._judge.require_progress(step, reason)
        return replace(result, left_out=reason)

    def _note(self, step: int, pending: PendingStep, result: StepResult, reason: str) -> None:
        world, run = self._engine.groups.world, self._engine.run
        # (ranks,): whose shards hold what is not finite, or too large.
        squares = start_all_gather(pending.own_square.reshape(1), world).wait().tolist()
        self._forget_exchanges()
        # Every rank takes part in the all-gather above; the rest is rank 0's.
        if world.index:
            return
        batch, size = self._engine.course.batch(step), run.training.global_batch
        # Where each sample of the batch comes from, so that bad data can be found and looked at.
        samples = []
        for position in range(batch * size, (batch + 1) * size):
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
