"""How long a stop may take: until the step under way has ended and a checkpoint is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

from cuboid.spec.run import Run

UNMEASURED = 300
"""Seconds, before the run has shown how long its steps and saves take."""
LEAST = 60
MARGIN = 2.0
"""Over the slowest step and save seen: the file system is busiest when many jobs are stopped at once."""


def grace_seconds(run: Run) -> tuple[int, str]:
    """Seconds, and where they come from: the run's folder, if it has trained before."""
    step, save = measured(Path(run.output.folder) / "metrics.jsonl")
    if not save:
        return UNMEASURED, "assumed: this run has not saved yet"
    needed = MARGIN * (step + save)
    return max(
        LEAST, math.ceil(needed)
    ), f"measured: {MARGIN:g} × ({step:.2g} s a step + {save:.2g} s a save), at least {LEAST} s"


def measured(metrics: Path) -> tuple[float, float]:
    """The slowest step but the first, which also warms up, and the slowest save; zeros before there were any."""
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return 0.0, 0.0
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be a part of one
    saves = [save for row in rows for save in row.get("checkpoints", []) if not save.get("warning")]
    step = max((row["seconds"] for row in rows[1:] or rows), default=0.0)
    return step, max((save["stall_seconds"] + save["write_seconds"] for save in saves), default=0.0)
