"""Where the time of a run went, since it was first started: kept across restarts and resumes.

Every second is in exactly one place. Each row of metrics.jsonl tells the sums up to it; `goodput.json` tells them as an
attempt begins, when rows of steps that are to be done again have been dropped, and as it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cuboid.telemetry.heartbeat import PHASE, PHASE_SINCE, PHASES, SPENT, Heartbeat, Phase

FILE = "goodput.json"
ATTEMPT = "attempt.json"


@dataclass(frozen=True)
class Spent:
    """Seconds by what they were spent on."""

    steps: float = 0.0
    """Steps that stand."""
    set_up: float = 0.0
    """From the start of ranks to their first step."""
    saves: float = 0.0
    """What the training waited for saves."""
    evaluation: float = 0.0
    lost_steps: float = 0.0
    """Steps that were done again, or will be."""
    restarts: float = 0.0
    """From the last step before a failure to the next start of ranks."""
    stopped: float = 0.0
    """No command ran: in no sum."""
    until: float = 0.0
    """When this was written, in seconds since 1970."""

    @property
    def total(self) -> float:
        return self.steps + self.set_up + self.saves + self.evaluation + self.lost_steps + self.restarts

    @property
    def goodput(self) -> float:
        """The share of the time in which the run got on; 1 where none has passed."""
        return self.steps / self.total if self.total else 1.0

    def as_row(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}

    def told(self) -> str:
        """One line for people."""
        names = ("set_up", "saves", "evaluation", "lost_steps", "restarts")
        parts = [
            f"{getattr(self, name):.1f} s {name.replace('_', ' ')}" for name in names if getattr(self, name) >= 0.05
        ]
        losses = f" ({', '.join(parts)})" if parts else ""
        return f"goodput {100 * self.goodput:.1f} %: {self.steps:.1f} of {self.total:.1f} s in steps that count{losses}"


@dataclass(frozen=True)
class Attempt:
    """When the ranks were started, as their supervisor tells them, in seconds since 1970."""

    command: float
    """When the command was started that is their supervisor."""
    ranks: float


def note_attempt(folder: Path, attempt: Attempt) -> None:
    (folder / ATTEMPT).write_text(json.dumps(asdict(attempt)))


def find_attempt(heartbeat: Heartbeat) -> Attempt:
    """Of ranks that nobody supervises their own start counts."""
    if heartbeat.folder is not None and (heartbeat.folder / ATTEMPT).exists():
        return Attempt(**json.loads((heartbeat.folder / ATTEMPT).read_text()))
    begun = time.time() - sum(spent(heartbeat).values())
    return Attempt(begun, begun)


def spent(heartbeat: Heartbeat) -> dict[Phase, float]:
    """Seconds this process has been in each phase."""
    words = heartbeat.words
    seconds = {phase: words[SPENT + index] / 1e9 for index, phase in enumerate(PHASES)}
    seconds[PHASES[words[PHASE]]] += (time.monotonic_ns() - words[PHASE_SINCE]) / 1e9
    return seconds


def read_spent(folder: str | Path) -> Spent | None:
    """As last written into a run's folder."""
    with suppress(OSError, ValueError, TypeError):
        return Spent(**json.loads((Path(folder) / FILE).read_text()))
    return None


def carry_over(newest: Spent, kept: Spent, attempt: Attempt) -> Spent:
    """What an attempt begins with. `newest`: the latest that was written; `kept`: that of the last step that
    stands."""
    if not newest.until:
        return Spent(until=attempt.command)
    lost = max(0.0, newest.steps - kept.steps)
    # Where this command has not got as far as a first step yet, all its time is set-up.
    begins = attempt.command if newest.until < attempt.command else max(newest.until, attempt.ranks)
    gap = begins - newest.until
    was_stopped = newest.until < attempt.command
    return replace(
        newest,
        steps=newest.steps - lost,
        lost_steps=newest.lost_steps + lost,
        stopped=newest.stopped + (gap if was_stopped else 0.0),
        restarts=newest.restarts + (0.0 if was_stopped else gap),
        until=begins,
    )


class Goodput:
    """The book of one attempt, kept by the rank that writes the rows."""

    def __init__(self, folder: str | Path, rows: Sequence[Mapping[str, Any]], done: int, heartbeat: Heartbeat) -> None:
        """`rows`: those of the run so far, before rows of steps beyond `done` are dropped."""
        self._folder, self._heartbeat = Path(folder), heartbeat
        newest = max([read_spent(folder) or Spent(), *map(_spent_of, rows)], key=lambda spent: spent.until)
        self._before = carry_over(newest, _kept(rows, done), find_attempt(heartbeat))
        self._others = _beside_set_up(heartbeat)
        self.write()

    def now(self) -> Spent:
        others, earlier, now = _beside_set_up(self._heartbeat), self._others, time.time()
        since = [after - before for after, before in zip(others, earlier, strict=True)]
        steps, saves, evaluation = since
        before = self._before
        # What is not in a phase of the training went before the first: the clock of the wall decides.
        set_up = max(0.0, now - before.until - sum(since))
        return replace(
            before,
            steps=before.steps + steps,
            set_up=before.set_up + set_up,
            saves=before.saves + saves,
            evaluation=before.evaluation + evaluation,
            until=now,
        )

    def rewind(self, rows: Sequence[Mapping[str, Any]], done: int) -> None:
        """Steps after `done` of those told in `rows` will be done again."""
        now = self.now()
        lost = max(0.0, now.steps - _kept(rows, done).steps)
        self._before = replace(now, steps=now.steps - lost, lost_steps=now.lost_steps + lost)
        self._others = _beside_set_up(self._heartbeat)
        self.write()

    def write(self) -> None:
        """All at once; a full disk costs the book, and nothing else."""
        aside = self._folder / f".{FILE}.writing"
        with suppress(OSError):
            aside.write_text(json.dumps(self.now().as_row()) + "\n")
            os.replace(aside, self._folder / FILE)


def _beside_set_up(heartbeat: Heartbeat) -> tuple[float, float, float]:
    seconds = spent(heartbeat)
    return seconds["step"], seconds["save"] + seconds["finish"], seconds["evaluation"]


def _kept(rows: Sequence[Mapping[str, Any]], done: int) -> Spent:
    """Of the last step that stands."""
    return next((_spent_of(row) for row in reversed(rows) if row["step"] <= done), Spent())


def _spent_of(row: Mapping[str, Any]) -> Spent:
    known = {field.name for field in fields(Spent)}
    return Spent(**{name: value for name, value in row.get("spent", {}).items() if name in known})
