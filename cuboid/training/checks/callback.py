"""Checks some steps of a running training, and names an error in the words of `cuboid verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from cuboid.console import say
from cuboid.data.source import Source
from cuboid.errors import UserError
from cuboid.parallel.collectives import all_reduce_maximum
from cuboid.parallel.parallelize import Engine
from cuboid.resilience.bad_steps import number
from cuboid.training.callbacks import Callback
from cuboid.training.checks.check import Check
from cuboid.training.checks.copies import Copies
from cuboid.training.checks.data import Data
from cuboid.training.checks.located import Located, sentence
from cuboid.training.checks.matrices import Matrices
from cuboid.training.checks.origin import origin
from cuboid.training.checks.passes import Passes
from cuboid.training.checks.replay import Replay
from cuboid.training.checks.sampling import CheckTimer, SampledStep, Sampling
from cuboid.training.checks.sums import Sums
from cuboid.training.checks.updates import Updates
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
    "copies": lambda engine, optimizer, _: Copies(engine, optimizer),
}
"""By name in `checks.only`."""


@dataclass(frozen=True)
class Wrong:
    """A warning of a run: an error that a check found, as a sentence and field by field."""

    kind: str
    text: str
    located: dict[str, Any]


class Checks(Callback):
    def __init__(self, engine: Engine, optimizer: Optimizer, source: Source, done: int) -> None:
        """`done`: steps that the run had when it started, or started again."""
        self._engine, self._spec = engine, engine.run.checks
        self._checks = {name: MAKERS[name](engine, optimizer, source) for name in self._spec.names}
        self._sampling, self._timer = Sampling(engine, self._spec, done), CheckTimer(self._spec)
        self._sampled_step: SampledStep | None = None
        """The step that is computed, if it is checked."""
        self._checked = 0
        """The last step whose gradients were checked."""
        self._suspects: list[Located] = []
        """Errors that checks of some blocks found, until a step that checks everything finds the first one."""
        self._suspected: set[tuple[str, str]] = set()
        self._reported: set[tuple[str, str]] = set()

    def _active(self) -> list[Check]:
        sampled = self._sampled_step
        return [] if sampled is None else [check for name, check in self._checks.items() if name in sampled.names]

    @contextmanager
    def around_step(self, trainer: Trainer, step: int) -> Iterator[None]:
        self._sampled_step = self._sampling.at(step)
        if self._sampled_step is None:
            yield
            return
        with trainer.kernel_by_kernel():
            for check in self._active():
                check.begin(self._sampled_step)
            try:
                yield
            finally:
                for check in reversed(self._active()):
                    check.detach()

    def judge(self, trainer: Trainer, step: int) -> LeavesOut | None:
        if self._sampled_step is None:
            return None

        def see(result: StepResult) -> str:
            if result.is_finite:
                begin = perf_counter()
                ledger = self._engine.ledger
                counted = {} if ledger is None else dict(ledger.entries)
                for check in self._active():
                    check.see_gradients(result)
                if ledger is not None:
                    ledger.entries = counted  # communication of checks does not count in the step
                self._checked = step
                if self._engine.device.type == "cuda":  # a step's time does not include what runs before the update
                    torch.cuda.synchronize()
                    if self._sampled_step is not None and not self._sampled_step.covers_all:
                        self._timer.add(perf_counter() - begin)
            return ""

        return see

    def on_result(self, trainer: Trainer, step: int, result: StepResult, pending: PendingStep) -> StepResult | None:
        if result.left_out:  # it has no update
            self._checked = 0
        return result

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        sampled = self._sampled_step
        self._timer.note(step, result.seconds, sampled if sampled is not None and sampled.step == step else None)

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        self._sampling.start_again(step)

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return self._sampled_step is not None

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        sampled = self._sampled_step
        if sampled is None or self._checked != step:
            return
        begin = perf_counter()
        found = [each for check in self._active() for each in check.judge(self._engine, trainer.optimizer, step)]
        if self._sampling.is_first_of_round(step) and not sampled.covers_all:
            self._sampling.next_length = self._agreed(self._timer.next_length())
        if self._engine.ledger is not None:
            self._engine.ledger.take()  # communication of checks does not count in a step
        if not sampled.covers_all:
            self._timer.add(perf_counter() - begin)
        trainer.start_clock()
        names = {(each.tensor, each.where) for each in found}
        if sampled.covers_all or step == trainer.run.training.steps:
            found, self._suspects = self._suspects + found, []
            if found:
                self._report(trainer, step, found)
        elif not names <= self._suspected:
            self._suspected |= names
            self._suspects = found
            self._sampling.repeat_at(step + 1)

    def _agreed(self, length: int) -> int:
        """The longest length that any rank asks for."""
        longest = torch.tensor(length, device=self._engine.device)
        return int(all_reduce_maximum(longest, self._engine.groups.world))

    def _report(self, trainer: Trainer, step: int, found: list[Located]) -> None:
        """Only the first in the order of execution: the others may follow from it. Each is reported once."""
        first = origin(found)
        is_new = (first.tensor, first.where) not in self._reported
        self._reported.add((first.tensor, first.where))
        text = f"check: {sentence(first)}"
        if is_new and trainer.rank == 0:
            # JSON has no NaN and no infinity.
            wrong = Wrong("check", text, {**asdict(first), "error": number(first.error)})
            for callback in trainer.callbacks:
                if isinstance(callback, Metrics):
                    callback.warn(asdict(wrong))
            if self._spec.wrong == "warn":
                say(f"step {step}: {text}", as_warning=True)
        if self._spec.wrong == "stop":
            raise UserError(f"step {step}: {text}; checks.wrong=warn trains on")
