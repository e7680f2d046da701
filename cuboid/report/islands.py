"""The islands of a run, as far as their folders are on this disk: where each is, and what its latest round said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cuboid.errors import UserError
from cuboid.readers import plain_file
from cuboid.report.source import Source, finite
from cuboid.telemetry.rows import Row, parse_metric_rows

TAIL = 1 << 18
"""Bytes of each island's log that are read: its newest rows."""


def islands(source: Source) -> list[dict[str, Any]] | None:
    """One that is alone on its machine tells of itself."""
    if source.folder is None or source.run.islands.count == 1:
        return None
    folder = source.folder.resolve()
    beside = sorted(folder.parent.glob("island-*")) if folder.name.startswith("island-") else []
    found = [told for each in beside or [folder] if (told := _island(each)) is not None]
    newest = max((each["step"] for each in found), default=0)
    for each in found:
        each["lag"] = newest - each["step"]
    return sorted(found, key=lambda each: each["island"]) or None


def _island(folder: Path) -> dict[str, Any] | None:
    """None before its first round."""
    rows = _newest(folder / "metrics.jsonl")
    said = next((row["islands"] for row in reversed(rows) if row.get("islands")), None)
    if said is None:
        return None
    whole = {name: int(said.get(name, 0)) for name in ("island", "round", "islands")}
    return {
        **whole,
        "step": rows[-1]["step"],
        "skipped": sum(int(row["islands"].get("lag", 0)) for row in rows if row.get("islands")),
        **{name: finite(said.get(name)) for name in ("outer_gradient_norm", "drift", "waited")},
    }


def _newest(path: Path) -> list[Row]:
    """A row that is half written, or a log that is none, is another run's business."""
    try:
        with plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL))
            text = file.read(TAIL)
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
        return parse_metric_rows(path, b"".join(lines[1:] if size > TAIL else lines))
    except UserError:
        return []


def island_line(told: dict[str, Any]) -> str:
    """In a terminal."""
    skipped = f"   skipped {told['skipped']}" if told["skipped"] else ""
    sizes = f"outer gradient {_short(told['outer_gradient_norm'])}   apart {_short(told['drift'])}"
    return f"island {told['island']}   step {told['step']}   lag {told['lag']}{skipped}   {sizes}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
