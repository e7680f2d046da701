"""A few steps of a run, once more and beside it, on this machine as it is now: what a report predicts from.

Where ranks share cores, what a step takes is decided by how they wait for one another. No kernel timed alone knows
that; steps of the same job do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from cuboid.errors import UserError
from cuboid.report.source import PROBE
from cuboid.spec.run import CheckpointSpec, OutputSpec, Run, dump_run
from cuboid.telemetry.rows import metric_rows

STEPS, FIRST = 6, 3
"""Steps of a rehearsal, and which one counts first: those before pay for warming up."""


def rehearse(run: Run, folder: Path) -> float:
    """Seconds of a step; also kept in the run's folder, for reports to come."""
    with tempfile.TemporaryDirectory() as place:
        short = replace(
            run,
            training=replace(run.training, steps=STEPS),
            output=OutputSpec(folder=f"{place}/run"),
            checkpoint=CheckpointSpec(),
            plan={},
        )
        file = Path(place) / "run.toml"
        file.write_text(dump_run(short), encoding="utf-8")
        words = [sys.executable, "-m", "cuboid.cli.main", "train", str(file), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        rows = metric_rows(Path(place) / "run" / "metrics.jsonl")
    seconds = [float(row["seconds"]) for row in rows if row["step"] >= FIRST]
    if done.returncode or not seconds:
        why = (done.stderr.strip().splitlines() or ["no step was done"])[-1].removeprefix("error: ")
        raise UserError(f"probe=true needs steps of {run.layout} on this machine, which failed: {why}")
    found = median(seconds)
    told = {"layout": str(run.layout), "step_seconds": found, "steps": len(seconds), "host": socket.gethostname()}
    (folder / PROBE).write_text(json.dumps(told) + "\n", encoding="utf-8")
    return found
