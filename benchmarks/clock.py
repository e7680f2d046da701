"""When each step of a training has ended, all that follows it included, by the wall and by the rank's own CPU time: a
callback, `python:benchmarks/clock.py:Clock`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from cuboid import Callback


class Clock(Callback):
    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    def on_end(self, trainer: Any) -> None:
        (Path(trainer.run.output.folder) / f"clock-{trainer.rank}.json").write_text(json.dumps(self._ends))
