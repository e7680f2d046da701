"""Looks at some steps of a training as `cuboid verify` looks at a layout, and says what is wrong in the same words."""

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
from cuboid.training.checks.matrices import Matrices
from cuboid.training.checks.origin import origin
from cuboid.training.checks.passes import Passes
from cuboid.training.checks.replay import Replay
from cuboid.training.checks.sums import Sums
from cuboid.training.checks.turns import Clock, Look, Turns
from cuboid.training.checks.updates import Updates
from cuboid.training.checks.words import Located, told
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
    """What a check found: as a warning of a run has it, and in single words."""

    kind: str
    text: str
    located: dict[str, Any]


class Checks(Callback):
    def __init__(self, engine: Engine, optimizer: Optimizer, source: Source, done: int) -> None:
        """`done`: steps that the run had when it started, or started again."""
        self._engine, self._spec = engine, engine.run.checks
        self._checks = {name: MAKERS[name](engine, optimizer, source) for name in self._spec.names}
        self._turns, self._clock = Turns(engine, self._spec, done), Clock(self._spec)
        self._look: Look | None = None
        """At the step that is computed."""
        self._looked_at = 0
        """The step whose gradients were seen."""
        self._suspects: list[Located] = []
        """What a look at a part has found, until one at everything says where it begins."""
        self._suspected: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def _looking(self) -> list[Check]:
        return [] if self._look is None else [check for name, check in self._checks.items() if name in self._look.names]

    @contextmanager
    def around_step(self, trainer: Trainer, step: int) -> Iterator[None]:
        self._look = self._turns.look(step)
        if self._look is None:
            yield
            return
        with trainer.kernel_by_kernel():
            for check in self._looking():
                check.begin(self._look)
            try:
                yield
            finally:
                for check in reversed(self._looking()):
                    check.detach()

    def judge(self, trainer: Trainer, step: int) -> LeavesOut | None:
        if self._look is None:
            return None

        def see(result: StepResult) -> str:
            if result.is_finite:
                begin = perf_counter()
                ledger = self._engine.ledger
                counted = {} if ledger is None else dict(ledger.entries)
                for check in self._looking():
                    check.see_gradients(result)
                if ledger is not None:
                    ledger.entries = counted  # what a check communicates is no part of a step
                self._looked_at = step
                if self._engine.device.type == "cuda":  # which times steps without what comes before an update
                    torch.cuda.synchronize()
                    if self._look is not None and not self._look.is_whole:
                        self._clock.add(perf_counter() - begin)
            return ""

        return see

    def on_result(self, trainer: Trainer, step: int, result: StepResult, pending: PendingStep) -> StepResult | None:
        if result.left_out:  # its update is none
            self._looked_at = 0
        return result

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        self._clock.note(
            step, result.seconds, self._look if self._look is not None and self._look.step == step else None
        )

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        self._turns.start_again(step)

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return self._look is not None

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        look = self._look
        if look is None or self._looked_at != step:
            return
        begin = perf_counter()
        found = [each for check in self._looking() for each in check.judge(self._engine, trainer.optimizer, step)]
        if self._turns.begins_with(step) and not look.is_whole:
            self._turns.next_length = self._agreed(self._clock.next_length())
        if self._engine.ledger is not None:
            self._engine.ledger.take()  # no part of a step
        if not look.is_whole:
            self._clock.add(perf_counter() - begin)
        trainer.start_clock()
        names = {(each.tensor, each.where) for each in found}
        if look.is_whole or step == trainer.run.training.steps:
            found, self._suspects = self._suspects + found, []
            if found:
                self._tell(trainer, step, found)
        elif not names <= self._suspected:
            self._suspected |= names
            self._suspects = found
            self._turns.look_again(step + 1)

    def _agreed(self, length: int) -> int:
        """The longest that a rank asks for."""
        longest = torch.tensor(length, device=self._engine.device)
        return int(all_reduce_maximum(longest, self._engine.groups.world))

    def _tell(self, trainer: Trainer, step: int, found: list[Located]) -> None:
        """The first in the order of execution: others may follow from it. Each is told once."""
        first = origin(found)
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
