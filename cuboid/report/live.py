"""A run while it is in flight: read again and again, each time only what is new."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cuboid.errors import UserError
from cuboid.report.measured import MeasuredStep, kept_steps, measure
from cuboid.report.metrics import busiest
from cuboid.report.source import Row, Source, finite, open_source, told
from cuboid.report.summary import utilization
from cuboid.schedule.schedules import make_schedule

RECENT = 50
"""Steps from which speed and the time left are taken."""


@dataclass
class Watched:
    source: Source
    rows: list[Row] = field(default_factory=list)
    _read: int = 0
    _last: bytes = b""

    @classmethod
    def open(cls, path: str | Path, cluster: str = "") -> Watched:
        source = open_source(path, cluster)
        if source.folder is None:
            raise UserError(f"{path} is a plan, not a run; name the folder of a run, or use cuboid report {path}")
        return cls(source)

    @property
    def folder(self) -> Path:
        assert self.source.folder is not None
        return self.source.folder

    def refresh(self) -> int:
        """Reads on where it stopped; how many steps are new. A shorter file is one that a restart has begun anew."""
        path = self.folder / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size < self._read or not self._continues(path):
            self.rows, self._read, self._last = [], 0, b""
        before = len(self.rows)
        if size > self._read:
            with path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            lines = whole.splitlines(keepends=True)
            self._read, self._last = self._read + len(whole), (lines or [self._last])[-1]
            self.rows += [json.loads(line) for line in lines]
        self.source = Source(self.source.run, self.folder, self.source.cluster_name)  # forgets what it has read
        return max(0, len(self.rows) - before)

    def _continues(self, path: Path) -> bool:
        """Whether what was read is still there: a run that resumes from a checkpoint drops the rows it will redo."""
        if not self._read:
            return True
        with path.open("rb") as file:
            file.seek(self._read - len(self._last))
            return file.read(len(self._last)) == self._last

    @property
    def is_running(self) -> bool:
        """Whether somebody holds the claim on the folder; on file systems without locks nobody can tell, so yes."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def state(self) -> dict[str, Any]:
        """What there is to say now."""
        run, rows = self.source.run, self.rows
        last: Row = rows[-1] if rows else {}
        recent = [value for row in rows[1:][-RECENT:] or rows if (value := finite(row.get("seconds")))]
        each = median(recent) if recent else None
        tokens = run.training.global_batch * run.training.sequence
        done = int(last.get("step", 0))
        return {
            "folder": str(self.folder),
            "model": run.model.name,
            "layout": str(run.layout),
            "step": done,
            "steps": run.training.steps,
            "status": self._status(done),
            "loss": finite(last.get("loss")),
            "learning_rate": finite(last.get("learning_rate")),
            "gradient_norm": finite(last.get("gradient_norm")),
            "step_seconds": each,
            "tokens_per_second": tokens / each if each else None,
            "mfu": utilization(self.source, tokens / each) if each else None,
            "seconds_left": (run.training.steps - done) * each if each else None,
            "memory_peak_bytes": max((row["peak"] for row in self.source.memory.values()), default=None),
            "failures": len(self.source.failures),
            **busiest(last, run),
            "warnings": told(rows),
        }

    def _status(self, done: int) -> str:
        if done >= self.source.run.training.steps:
            return "finished"
        return "running" if self.is_running else "stopped"

    def last_pipeline(self) -> MeasuredStep | None:
        """The newest step of which the first pipeline has kept its times."""
        run = self.source.run
        layout = run.layout
        steps = kept_steps(self.source)
        schedule = make_schedule(layout.schedule, layout.pp, run.micro_batches, layout.vpp)
        ranks = list(range(0, layout.world_size, layout.world_size // layout.pp))
        for step in steps[-1:-4:-1]:  # the newest may not be written by all of them yet
            if found := measure(self.source, schedule, ranks, step):
                return found
        return None
