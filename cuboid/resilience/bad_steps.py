"""Bad steps: which they are, and the file of the run folder that tells of each.

All ranks judge alike, because all see the same summed numbers."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from cuboid.console import say
from cuboid.errors import UserError
from cuboid.readers import is_finite, read_rows
from cuboid.spec.run import Run
from cuboid.spec.train_state import Course

FILE = "bad_steps.jsonl"
SCALE = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SPREAD = 1e-2
"""Of the median: numbers that hardly differ are no measure of what is usual."""
LEAST_HISTORY = 16
"""Good steps before which nothing is called a spike; a shorter window is enough."""


class Judge:
    def __init__(self, run: Run, course: Course, done: int) -> None:
        self._spec, self._folder, self._course = run.resilience, run.output.folder, course
        self._furthest = done
        self._bad = 0

    @property
    def looks_for_spikes(self) -> bool:
        """Then a step is judged before its update, for which the host waits."""
        return self._spec.spike_score > 0

    def reason(self, step: int, loss: float, norm: float) -> str:
        """Why a step is bad, as a sentence; empty if it is good. Called once for each step, counted from 0."""
        found = self._not_finite(loss, norm) or self._spike(loss, norm)
        if found:
            self._bad += 1
            return found
        if step >= self._furthest:  # one that is done again is no progress
            self._furthest, self._bad = step + 1, 0
        if self.looks_for_spikes:
            window = self._spec.spike_window
            self._course.losses = [*self._course.losses, loss][-window:]
            self._course.norms = [*self._course.norms, norm][-window:]
        return ""

    def require_progress(self, step: int, reason: str) -> None:
        """Stop where the policy says so, and where bad steps do not end."""
        replay = f"run `cuboid replay {self._folder} --step {step + 1}` to tell data from hardware"
        if self._spec.bad_steps == "stop":
            raise UserError(f"step {step + 1} is bad ({reason}) and resilience.bad_steps=stop; {replay}")
        if self._bad > self._spec.most_bad_steps:
            raise UserError(
                f"step {step + 1} is bad ({reason}), as were {self._bad - 1} before it with no good one between, more "
                f"than resilience.most_bad_steps={self._spec.most_bad_steps}; {replay}"
            )

    def _not_finite(self, loss: float, norm: float) -> str:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"{name} is not finite"
        return ""

    def _spike(self, loss: float, norm: float) -> str:
        history = (("loss", loss, self._course.losses), ("gradient norm", norm, self._course.norms))
        if not self.looks_for_spikes or len(self._course.losses) < min(LEAST_HISTORY, self._spec.spike_window):
            return ""
        for name, value, recent in history:
            usual = median(recent)
            spread = SCALE * median(abs(one - usual) for one in recent)
            score = (value - usual) / max(spread, LEAST_SPREAD * abs(usual), 1e-30)
            if score > self._spec.spike_score:
                return f"{name} {value:.4g} is {score:.1f} deviations above the usual {usual:.4g}"
        return ""


def note_bad_step(run: Run, row: dict[str, Any]) -> None:
    """One line more in the run folder; called by rank 0."""
    path = Path(run.output.folder) / FILE
    told = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **row}
    try:
        with path.open("a") as file:
            file.write(json.dumps(told) + "\n")
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror or error}; the training continues", as_warning=True)


def bad_steps(folder: str | Path) -> list[dict[str, Any]]:
    """What a run's folder tells, oldest first."""
    return read_rows(Path(folder) / FILE, _is_told)


def _is_told(row: dict[str, Any]) -> bool:
    """Whether a row has a step, and one that names its batch all that `note_bad_step` was told of it."""
    step, reason = row.get("step"), row.get("reason", "")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0 or not isinstance(reason, str):
        return False
    if "batch" not in row:
        return True
    numbers = [row.get("loss"), row.get("gradient_norm"), *_list(row, "squared_norms")]
    skipped = _list(row, "skipped")
    return (
        all(is_finite(value) or value in ("nan", "inf", "-inf") for value in numbers)
        and all(isinstance(batch, int) for batch in skipped)
        and isinstance(row.get("layout"), str)
        and "reason" in row
    )


def _list(row: dict[str, Any], name: str) -> list[Any]:
    """What is no list holds something that is nothing."""
    return row[name] if isinstance(row.get(name), list) else [None]


def number(value: float) -> float | str:
    """In JSON, which has no word for what is not finite."""
    return value if math.isfinite(value) else str(value)
