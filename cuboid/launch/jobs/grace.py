"""How long a stop may take: until the step in flight has ended and a checkpoint is written."""

from __future__ import annotations

import math

from cuboid.resilience.measured import measured
from cuboid.spec.run import Run

UNMEASURED = 300
"""Seconds, before the run has shown how long its steps and saves take."""
LEAST = 60
MARGIN = 2.0
"""Over the slowest step and save seen: the file system is busiest when many jobs are stopped at once."""


def grace_seconds(run: Run) -> tuple[int, str]:
    """Seconds, and where they come from: the run's folder, if it has trained before."""
    found = measured(run.output.folder)
    asked = math.ceil(run.resilience.grace_seconds)
    if not found.saved:
        return max(UNMEASURED, asked), "assumed: this run has not saved yet"
    needed = MARGIN * (found.slowest_step + found.slowest_save)
    why = f"{MARGIN:g} × ({found.slowest_step:.2g} s a step + {found.slowest_save:.2g} s a save), at least {LEAST} s"
    return max(LEAST, math.ceil(needed), asked), f"measured: {why}"
