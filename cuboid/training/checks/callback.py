"""Looks at some steps of a training as `cuboid verify` looks at a layout, and says what is wrong in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from cuboid.console import say
from cuboid.data.source import Source
from cuboid.errors import UserError
from cuboid.parallel.parallelize import Engine
from cuboid.resilience.bad_steps import number
from cuboid.training.callbacks import Callback
from cuboid.training.checks.check import Check
from cuboid.training.checks.copies import Copies
from cuboid.training.checks.data import Data
from cuboid.training.checks.matrices import Matrices
from cuboid.training.checks.passes import Passes
from cuboid.training.checks.replay import Replay
from cuboid.training.checks.sums import Sums
from cuboid.training.checks.updates import Updates
from cuboid.training.checks.words import Located, Pass, told
from cuboid.training.metrics import Metrics
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import LeavesOut, PendingStep, StepResult

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer

MAKERS: dict[str, Callable[[Engine, Optimizer, Source], Check]] = {
    "data": lambda engine, _, source: Data(engine, source),
    "passes": lambda engine, *_: Passes(engine),
    "replay": lambda engine, *_: Replay(engine),
    "sums": lambda engine, *_: Sums(engine),
    "updates": lambda engine, optimizer, _: Updates(engine, optimizer),
    "matrices": lambda engine, optimizer, _: Matrices(engine, optimizer),
    "copies": lambda engine, *_: Copies(engine),
}
"""By name in `checks.only`."""


@dataclass(frozen=True)
class Wrong:
    """What a check found: as a warning of a run has it, and in single words."""

    kind: str
    text: str
    located: dict[str, Any]


class Checks(Callback):
    def __init__(self, engine: Engine, optimizer: Optimizer, source: Source, done: int) -> None:
        """`done`: steps that the run had when it started, or started again."""
        self._engine, self._spec, self._started = engine, engine.run.checks, done
        self._checks = [MAKERS[name](engine, optimizer, source) for name in self._spec.names]
        self._looked_at = 0
        """The step whose gradients were seen."""
        self._told: set[tuple[str, str]] = set()

    def is_due(self, step: int) -> bool:
        """Whether a step, counted from 1, is checked: each `every` steps, and those after a start, when weights and
        state come from elsewhere."""
        return step % self._spec.every == 0 or step <= self._started + self._spec.first

    @contextmanager
    def around_step(self, trainer: Trainer, step: int) -> Iterator[None]:
        if not self.is_due(step):
            yield
            return
        for check in self._checks:
            check.begin(step)
        try:
            yield
        finally:
            for check in reversed(self._checks):
                check.detach()

    def judge(self, trainer: Trainer, step: int) -> LeavesOut | None:
        if not self.is_due(step):
            return None

        def see(result: StepResult) -> str:
            if result.is_finite:
                ledger = self._engine.ledger
                counted = {} if ledger is None else dict(ledger.entries)
                for check in self._checks:
                    check.see_gradients(result)
                if ledger is not None:
                    ledger.entries = counted  # what a check communicates is no part of a step
                self._looked_at = step
            return ""

        return see

    def on_result(self, trainer: Trainer, step: int, result: StepResult, pending: PendingStep) -> StepResult | None:
        if result.left_out:  # its update is none
            self._looked_at = 0
        return result

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        self._started = step

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return self.is_due(step)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if self._looked_at != step:
            return
        found = [each for check in self._checks for each in check.judge(self._engine, trainer.optimizer, step)]
        if self._engine.ledger is not None:
            self._engine.ledger.take()  # no part of a step
        trainer.start_clock()
        if found:
            self._tell(trainer, step, found)

    def _tell(self, trainer: Trainer, step: int, found: list[Located]) -> None:
        """The first in the order of execution: others may follow from it. Each is told once."""
        order = get_args(Pass)
        # What is wrong on one rank says more than what is wrong over all.
        first = min(found, key=lambda each: (order.index(each.where), each.rank is None))
        is_new = (first.tensor, first.where) not in self._told
        self._told.add((first.tensor, first.where))
        text = f"check: {told(first)}"
        if is_new and trainer.rank == 0:
            # JSON has no word for what is not a number.
            wrong = Wrong("check", text, {**asdict(first), "error": number(first.error)})
            for callback in trainer.callbacks:
                if isinstance(callback, Metrics):
                    callback.warn(asdict(wrong))
            if self._spec.wrong == "warn":
                say(f"step {step}: {text}", as_warning=True)
        if self._spec.wrong == "stop":
            raise UserError(f"step {step}: {text}; checks.wrong=warn trains on")
