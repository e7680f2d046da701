"""Starts a training again when a rank fails, for as long as it gets on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.errors import RankError
from cuboid.resilience.failures import Failure, note_failure
from cuboid.spec.run import Run
from cuboid.train.folder import checkpoint_folder

if TYPE_CHECKING:
    from cuboid.train.trainer import Outcome


def supervise(run: Run, attempt: Callable[[], Outcome]) -> Outcome:
    """`attempt` trains to the end, from the newest checkpoint; it raises `RankError` when a rank fails.

    What the user must mend (`UserError`) and what the user asked for (a signal) passes through."""
    allowed = run.resilience.restarts
    fruitless = 0
    reached = _newest_step(run)
    while True:
        try:
            return attempt()
        except RankError as error:
            step = _newest_step(run)
            fruitless = 0 if step > reached else fruitless + 1
            reached = max(step, reached)
            restarts = run.checkpoint.every > 0 and fruitless <= allowed
            note_failure(run, Failure(datetime.now(UTC).isoformat(timespec="seconds"), str(error), step, restarts))
            if not restarts:
                if fruitless > 1:
                    raise RankError(f"{error}; {fruitless} attempts in a row made no checkpoint") from None
                raise
            print(f"warning: {error}; starting again", file=sys.stderr, flush=True)


def _newest_step(run: Run) -> int:
    return max((step_of(path) for path in checkpoints(checkpoint_folder(run))), default=0)
