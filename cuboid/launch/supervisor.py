"""Starts a training again when a rank fails, for as long as it gets on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cuboid.errors import RankError
from cuboid.resilience.failures import Failure, note_failure, seconds_since
from cuboid.spec.run import Run
from cuboid.train.folder import newest_kept

if TYPE_CHECKING:
    from cuboid.train.trainer import Outcome


class Restarts:
    """Whether a run that failed is worth another attempt; keeps the log of its failures."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._fruitless = 0
        self._reached = newest_kept(run)

    def failed(self, kind: str, node: str, reason: str, layout: str) -> str:
        """The sentence to give up with; empty: start again."""
        step = newest_kept(self._run)
        self._fruitless = 0 if step > self._reached else self._fruitless + 1
        self._reached = max(step, self._reached)
        again = self._run.checkpoint.keeps and self._fruitless <= self._run.resilience.restarts
        now, lost = datetime.now(UTC).isoformat(timespec="seconds"), seconds_since(self._run, step)
        note_failure(self._run, Failure(now, reason, step, again, kind, node, layout, lost))
        if again:
            return ""
        return f"{reason}; {self._fruitless} attempts in a row made no checkpoint" if self._fruitless > 1 else reason


def supervise(run: Run, attempt: Callable[[], Outcome]) -> Outcome:
    """`attempt` trains to the end, from the newest checkpoint; it raises `RankError` when a rank fails.

    What the user must mend (`UserError`) and what the user asked for (a signal) passes through."""
    restarts = Restarts(run)
    while True:
        try:
            return attempt()
        except RankError as error:
            if verdict := restarts.failed(error.kind, "", str(error), str(run.layout)):
                raise RankError(verdict) from None
            print(f"warning: {error}; starting again", file=sys.stderr, flush=True)
