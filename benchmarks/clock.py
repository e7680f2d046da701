"""When each step of a training has ended, all that follows it included: a callback,
`python:benchmarks/clock.py:Clock`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from cuboid import Callback


class Clock(Callback):
    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._ends.append(time.perf_counter())

    def on_end(self, trainer: Any) -> None:
        if trainer.rank == 0:
            (Path(trainer.run.output.folder) / "clock.json").write_text(json.dumps(self._ends))
