"""The failures of a run, one line each in `failures.jsonl`: when, what, and what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

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


def note_failure(run: Run, failure: Failure) -> None:
    path = Path(run.output.folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(failure)) + "\n")


def failures(folder: str | Path) -> list[Failure]:
    """What a run's folder tells, oldest first."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    return [Failure(**json.loads(line)) for line in path.read_text().splitlines()]
