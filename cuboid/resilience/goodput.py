"""Where the time of a run went, since it was first started: kept across restarts and resumes.

Every second is in exactly one place. Each row of metrics.jsonl tells the sums up to it; `goodput.json` tells them as an
attempt begins, when rows of steps that are to be done again have been dropped, and as it ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from cuboid.console import say
from cuboid.errors import UserError
from cuboid.readers import Unreadable, read_json, read_rows
from cuboid.spec.coding import decode
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import PHASE, PHASE_SINCE, PHASES, SPENT, Heartbeat, Phase
from cuboid.telemetry.rows import metric_rows

# The failures of a run, one line each in `failures.jsonl`: when, what, and what it cost.


FAILURES = "failures.jsonl"


@dataclass(frozen=True)
class Failure:
    time: str
    """UTC."""
    reason: str
    checkpoint: int
    """Steps of the newest checkpoint there was."""
    restarted: bool
    kind: str = "rank"
    """rank, node, hang (the watchdog ended ranks that stood still), or what else ended the run."""
    node: str = ""
    """Who told of it, or was lost; empty on one machine."""
    layout: str = ""
    seconds_lost: float | None = None
    """Of training, to be done again; None in a log that did not say."""


def note_failure(run: Run, failure: Failure) -> None:
    path = Path(run.output.folder) / FAILURES
    try:
        with path.open("a") as file:
            file.write(json.dumps(asdict(failure)) + "\n")
    except OSError as error:  # a full disk ends no training
        say(f"{path} cannot be written: {error.strerror or error}", as_warning=True)


def failures(folder: str | Path) -> list[Failure]:
    """What a run's folder tells, oldest first."""
    path = Path(folder) / FAILURES
    try:
        return [decode(Failure, row) for row in read_rows(path)]
    except Unreadable:
        raise
    except UserError as problem:
        raise UserError(f"{path} is damaged: {problem}; remove that line, or copy the file again") from None


def seconds_since(run: Run, step: int) -> float:
    """What the steps after this one took, as far as the run has told of them."""
    rows = metric_rows(Path(run.output.folder) / "metrics.jsonl")
    return round(float(sum(row.get("seconds", 0.0) for row in rows if row["step"] > step)), 3)


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
        """The fraction of the time that trained; 1 where none has passed."""
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
    clock: float = field(default_factory=lambda: time.time() - time.monotonic())
    """What the machine's counted seconds lacked to its wall clock when the command was started: the wall clock may be
    set while the command runs."""

    @property
    def now(self) -> float:
        return self.clock + time.monotonic()


def note_attempt(folder: Path, attempt: Attempt) -> None:
    """By a rename: ranks that torchrun started may read it at this very moment."""
    aside = folder / f".{ATTEMPT}.writing"
    aside.write_text(json.dumps(asdict(attempt)))
    os.replace(aside, folder / ATTEMPT)


def find_attempt(heartbeat: Heartbeat) -> Attempt:
    """Of ranks that nobody supervises their own start counts."""
    if heartbeat.folder is not None and (heartbeat.folder / ATTEMPT).exists():
        return Attempt(**read_json(heartbeat.folder / ATTEMPT))
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
    with suppress(UserError):
        return decode(Spent, read_json(Path(folder) / FILE))
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
        self._attempt = find_attempt(heartbeat)
        self._before = carry_over(newest, _kept(rows, done), self._attempt)
        self._others = _beside_set_up(heartbeat)
        self.write()

    def now(self) -> Spent:
        others, earlier, now = _beside_set_up(self._heartbeat), self._others, self._attempt.now
        since = [after - before for after, before in zip(others, earlier, strict=True)]
        steps, saves, evaluation = since
        before = self._before
        # What is not in a phase of the training went before the first.
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


# What a run's own folder shows of its steps, its saves and its failures.


@dataclass(frozen=True)
class Measured:
    """Seconds; zeros before there was anything to measure."""

    usual_step: float = 0.0
    slowest_step: float = 0.0
    """But the first, which also warms up."""
    saved: int = 0
    """How many checkpoints were written whole."""
    stall: float = 0.0
    """How long training waited for a save, in the median."""
    write: float = 0.0
    slowest_save: float = 0.0
    copied: int = 0
    """How many copies were made in memory."""
    copy_stall: float = 0.0
    copy_write: float = 0.0
    failures: int = 0
    """After which the run started its ranks again."""
    recovery: float = 0.0
    """From the last step before a failure to the first after it, on average."""


def measured(folder: str | Path) -> Measured:
    rows = metric_rows(Path(folder) / "metrics.jsonl")
    if not rows:
        return Measured()
    steps = [row.get("seconds", 0.0) for row in rows[1:] or rows]
    saves = [save for row in rows for save in row.get("checkpoints", []) if not save.get("warning")]
    disk = [save for save in saves if save.get("place", "disk") == "disk"]
    memory = [save for save in saves if save not in disk]
    restarted = sum(failure.restarted for failure in failures(folder))
    spent = read_spent(folder) or Spent()
    return Measured(
        usual_step=median(steps),
        slowest_step=max(steps),
        saved=len(disk),
        stall=_usual(disk, "stall_seconds"),
        write=_usual(disk, "write_seconds"),
        slowest_save=max(
            (save.get("stall_seconds", 0.0) + save.get("write_seconds", 0.0) for save in disk), default=0.0
        ),
        copied=len(memory),
        copy_stall=_usual(memory, "stall_seconds"),
        copy_write=_usual(memory, "write_seconds"),
        failures=restarted,
        recovery=spent.restarts / restarted + spent.set_up / (restarted + 1) if restarted else 0.0,
    )


def _usual(saves: list[dict[str, float]], field: str) -> float:
    return median(save.get(field, 0.0) for save in saves) if saves else 0.0
