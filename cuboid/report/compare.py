"""Several runs beside each other: losses, speed, memory, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.planning.plan import GIB
from cuboid.readers import parse_toml
from cuboid.report.source import Source, finite
from cuboid.report.summary import measured
from cuboid.spec.run import Run, dump_run
from cuboid.telemetry.rows import Row

NOT_COMPARED = ("plan", "output.folder")
"""What differs without making another training."""


@dataclass(frozen=True)
class Comparison:
    names: list[str]
    measured: list[dict[str, Any]]
    """For each run what it measured; nulls where it did not."""
    losses: list[dict[str, Any]]
    """At steps that all runs have done: each run's loss."""
    settings: list[dict[str, Any]]
    """Keys of the run file in which they differ, with each run's value."""

    @property
    def largest_difference(self) -> float | None:
        """Of losses at the same step."""
        spans = [max(row["values"]) - min(row["values"]) for row in self.losses]
        return max(spans, default=None)


def compare(sources: Sequence[Source]) -> Comparison:
    names = _names([source.folder or Path() for source in sources])
    return Comparison(names, [_told(source) for source in sources], _losses(sources), _settings(sources))


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _told(source: Source) -> dict[str, Any]:
    found = measured(source) or {}
    names = ("steps", "tokens", "last_loss", "step_seconds", "tokens_per_second", "mfu", "memory_gib")
    told: dict[str, Any] = {name: found.get(name) for name in names}
    validation = [value for row in source.rows if (value := finite(row.get("validation_loss"))) is not None]
    plan = source.plan
    told["validation_loss"] = validation[-1] if validation else None
    told["predicted_step_seconds"] = plan.seconds if plan else None
    told["predicted_memory_gib"] = plan.peak / GIB if plan else None
    told["ranks"] = source.run.layout.world_size
    told["failures"] = len(source.failures)
    return told


def _losses(sources: Sequence[Source]) -> list[dict[str, Any]]:
    found = [{row["step"]: value for row in source.rows if (value := _loss(row)) is not None} for source in sources]
    common = sorted(set.intersection(*(set(losses) for losses in found)))
    return [{"step": step, "values": [losses[step] for losses in found]} for step in common]


def _loss(row: Row) -> float | None:
    return finite(row.get("loss"))


def _settings(sources: Sequence[Source]) -> list[dict[str, Any]]:
    tables = [_flat(source.run) for source in sources]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [{"key": key, "values": [table.get(key) for table in tables]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def _flat(run: Run) -> dict[str, Any]:
    """Every key of the run file with its value, those that have their default included."""
    found: dict[str, Any] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for name, value in table.items():
            key = f"{prefix}{name}"
            if key in NOT_COMPARED:
                continue
            if isinstance(value, dict):
                walk(value, f"{key}.")
            else:
                found[key] = value

    walk(parse_toml(dump_run(run)), "")
    return found
