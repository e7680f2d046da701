"""What a run's own folder shows of its steps, its saves and its failures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cuboid.resilience.failures import failures
from cuboid.resilience.goodput import Spent, read_spent


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
    try:
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return Measured()
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be a part of one
    steps = [row["seconds"] for row in rows[1:] or rows] or [0.0]
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
        slowest_save=max((save["stall_seconds"] + save["write_seconds"] for save in disk), default=0.0),
        copied=len(memory),
        copy_stall=_usual(memory, "stall_seconds"),
        copy_write=_usual(memory, "write_seconds"),
        failures=restarted,
        recovery=spent.restarts / restarted + spent.set_up / (restarted + 1) if restarted else 0.0,
    )


def _usual(saves: list[dict[str, float]], field: str) -> float:
    return median(save[field] for save in saves) if saves else 0.0
