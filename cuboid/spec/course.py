"""What of a training's past decides how it goes on, besides its tensors: it is kept with every checkpoint, so that any
layout goes on alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Course:
    skipped: list[int] = field(default_factory=list)
    """Global batches that are left out, ascending, each counted in the order that leaves nothing out."""
    losses: list[float] = field(default_factory=list)
    """Of the latest good steps, where spikes are looked for."""
    norms: list[float] = field(default_factory=list)

    def batch(self, step: int) -> int:
        """The global batch of a step; both count from 0."""
        for skipped in self.skipped:
            step += skipped <= step
        return step

    def skip(self, batch: int) -> None:
        self.skipped = sorted({*self.skipped, batch})

    def table(self) -> dict[str, Any]:
        """For a manifest; empty where nothing of the past matters."""
        return {name: value for name, value in vars(self).items() if value}

    def restore(self, table: dict[str, Any]) -> None:
        vars(self).update(vars(from_table(table)))


def from_table(table: object) -> Course:
    """Raises ValueError for what is no course: it may come from a stranger."""
    if not isinstance(table, dict) or not table.keys() <= vars(Course()).keys():
        raise ValueError("is no course")
    course = Course(**table)
    if not all(isinstance(values, list) for values in table.values()) or any(
        type(batch) is not int or batch < 0 for batch in course.skipped
    ):
        raise ValueError("has batches that are none")
    if course.skipped != sorted(set(course.skipped)):
        raise ValueError("has batches out of order")
    if not all(type(value) is float and math.isfinite(value) for value in course.losses + course.norms):
        raise ValueError("has numbers that are none")
    return course
