"""A training killed on eight ranks continues with other layouts, and ends on one process, as if never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuboid.checkpoint.folder import newest_whole
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run, dump_run
from tests.training.cases import short_run

COMMON = ("training.precision=float64", "learning_rate.schedule=constant", "checkpoint.every=3", "training.sequence=8")


def losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def kill_midway(run: Run, file: Path, after: int) -> None:
    """Start the command, and end it with all its processes by SIGKILL after so many steps."""
    file.write_text(dump_run(run))
    command = [sys.executable, "-m", "cuboid.cli.main", "train", str(file)]
    started = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 600
    try:
        while len(losses(Path(run.output.folder))) < after:
            assert started.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_killed_and_gone_on_with_on_three_other_layouts(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = short_run("dp=2,tp=2,pp=2", str(folder), *COMMON, "training.steps=100000")
    kill_midway(first, tmp_path / "run.toml", after=10)
    for layout in ("dp=4,tp=2", "pp=2,dp=4,zero=3,schedule=zbv", "dp=1"):
        _, manifest, damaged = newest_whole(folder / "checkpoints")
        assert manifest is not None and manifest.step >= 6 and not damaged
        steps = manifest.step + 4
        run = short_run(layout, str(folder), *COMMON, f"training.steps={steps}")
        pool.run("tests.training.cases:train_rank", (run,), ranks=run.layout.world_size)
        assert len(losses(folder)) == steps
    seen = losses(folder)  # how many depends on when the command was met by its end
    alone = short_run("dp=1", str(tmp_path / "alone"), *COMMON, f"training.steps={len(seen)}")
    pool.run("tests.training.cases:train_rank", (alone,), ranks=1)
    assert seen == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
