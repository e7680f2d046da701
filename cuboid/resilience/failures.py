"""The failures of a run, one line each in `failures.jsonl`: when, what, and what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cuboid.console import say
from cuboid.spec.run import Run

FILE = "failures.jsonl"


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
    path = Path(run.output.folder) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(failure)) + "\n")
    except OSError as error:  # a full disk ends no training
        say(f"{path} cannot be written: {error.strerror or error}", as_warning=True)


def failures(folder: str | Path) -> list[Failure]:
    """What a run's folder tells, oldest first."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    # A supervisor that was killed while it wrote may have left half a line.
    whole = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [Failure(**json.loads(line)) for line in whole]


def seconds_since(run: Run, step: int) -> float:
    """What the steps after this one took, as far as the run has told of them."""
    path = Path(run.output.folder) / "metrics.jsonl"
    seconds = 0.0
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):  # who was killed may have left a part of one
            row = json.loads(line)
            seconds += row["seconds"] if row["step"] > step else 0.0
    return round(seconds, 3)
