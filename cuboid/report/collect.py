"""Everything a page shows, as one table that JSON holds: each section from its own file, none from torch."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import cuboid
from cuboid.report.layouts import considered, explorer
from cuboid.report.metrics import curves, experts, layers, shares
from cuboid.report.ranks import communication, memory, ranks
from cuboid.report.source import Source
from cuboid.report.summary import summary
from cuboid.report.timeline import timeline

STILL = ("considered", "explorer")
"""Sections that stay as they are while a run is running."""


def collect(source: Source, with_search: bool = True) -> dict[str, Any]:
    """`with_search`: also what other layouts would cost, which takes seconds on a large cluster."""
    run = source.run
    return {
        "kind": "plan" if source.folder is None else "run",
        "title": f"{run.model.name}, {run.layout}",
        "folder": None if source.folder is None else source.folder.name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": cuboid.__version__,
        "summary": summary(source),
        "ranks": ranks(source),
        "timeline": timeline(source),
        "memory": memory(source),
        "communication": communication(source),
        "curves": curves(source),
        "experts": experts(source),
        "layers": layers(source),
        "shares": shares(source),
        "considered": considered(source) if with_search else None,
        "explorer": explorer(source) if with_search else None,
    }
