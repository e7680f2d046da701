"""When each step of a training has ended, all that follows it included, by the wall and by the rank's own CPU time, and
what of that was spent in checks: a callback, `python:benchmarks/clock.py:Clock`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuboid import Callback


class Clock(Callback):
    def __init__(self) -> None:
        self._ends: list[tuple[float, float, float]] = []
        self._checks, self._is_inside = 0.0, False

    def on_start(self, trainer: Any) -> None:
        from cuboid.training.checks import passes, replay, sums
        from cuboid.training.checks.callback import Checks

        for callback in trainer.callbacks:
            if isinstance(callback, Checks):
                owners = [(check, name) for check in callback._checks.values() for name in MOMENTS]
                # What checks do while a step is computed, beside keeping a few tensors.
                for owner, name in [*owners, *((module, "sketch") for module in (passes, replay, sums))]:
                    setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return plain(*arguments, **named)
            self._is_inside, begin = True, time.thread_time()
            try:
                return plain(*arguments, **named)
            finally:
                self._is_inside = False
                self._checks += time.thread_time() - begin

        return timed

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._ends.append((time.perf_counter(), time.process_time(), self._checks))

    def on_end(self, trainer: Any) -> None:
        (Path(trainer.run.output.folder) / f"clock-{trainer.rank}.json").write_text(json.dumps(self._ends))


MOMENTS = ("begin", "see_gradients", "judge")
