"""What of a training's past decides how it continues, besides its tensors. Every checkpoint keeps it, so that any
layout resumes alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cuboid.spec.training import Batch


@dataclass
class Course:
    skipped: list[int] = field(default_factory=list)
    """Global batches that are skipped, ascending, each counted in the order that leaves nothing out."""
    losses: list[float] = field(default_factory=list)
    """Of the latest good steps, where spikes are looked for."""
    norms: list[float] = field(default_factory=list)
    loss_scale: list[float] = field(default_factory=list)
    """In fp16: the factor of the loss, the good steps since it changed, and how many steps have overflowed."""
    loads: list[int] = field(default_factory=list)
    """Of a mixture that is balanced over the global batch: assignments of each expert in the latest good step, layer
    by layer."""

    islands: dict[str, Any] = field(default_factory=dict)
    """Of an island: the round it begins next, its batches, what it knows of all, and what was in flight."""
    taken: dict[int, Batch] = field(default_factory=dict)
    """Of an island the batches of its latest steps; no part of a checkpoint."""

    def batch(self, step: int) -> Batch:
        """The global batch of a step; both count from 0."""
        if step in self.taken:
            return self.taken[step]
        for skipped in self.skipped:
            step += skipped <= step
        return step

    def skip(self, batch: int) -> None:
        self.skipped = sorted({*self.skipped, batch})

    def table(self) -> dict[str, Any]:
        """For a manifest; empty where nothing of the past matters."""
        return {name: value for name, value in vars(self).items() if value and name != "taken"}

    def restore(self, table: dict[str, Any]) -> None:
        vars(self).update(vars(from_table(table)))


def from_table(table: object) -> Course:
    """Raises ValueError for what is no course: it may come from a stranger."""
    if not isinstance(table, dict) or not table.keys() <= vars(Course()).keys() - {"taken"}:
        raise ValueError("is no course")
    course = Course(**table)
    _check_islands(course.islands)
    if not all(isinstance(values, list) for name, values in table.items() if name != "islands") or any(
        type(batch) is not int or batch < 0 for batch in course.skipped
    ):
        raise ValueError("has skipped batches that are no whole numbers from 0 on")
    if any(type(count) is not int or count < 0 for count in course.loads):
        raise ValueError("has expert loads that are no whole numbers from 0 on")
    if course.skipped != sorted(set(course.skipped)):
        raise ValueError("has batches out of order")
    numbers = course.losses + course.norms + course.loss_scale
    if not all(type(value) is float and math.isfinite(value) for value in numbers):
        raise ValueError("has losses or norms that are not finite")
    if course.loss_scale and (len(course.loss_scale) != 3 or course.loss_scale[0] < 1 or min(course.loss_scale) < 0):
        raise ValueError("has a loss scale that is none")
    return course


def _check_islands(table: object) -> None:
    if not isinstance(table, dict):
        raise ValueError("has islands that are no table")
    counts = [table.get("round", 0), *_items(table.get("tokens", []), 1), *_runs(table.get("left", []))]
    counts += _items(table.get("pending", []), 1)
    state = table.get("state") or {}
    if not isinstance(state, dict) or not isinstance(queues := state.get("queues", {}), dict):
        raise ValueError("has islands of no state")
    counts += [state.get("fresh", 0), *_runs(state.get("returned", []))]
    for number, queue in queues.items():
        if not (number.isascii() and number.isdigit()):
            raise ValueError("has an island without a number")
        if not isinstance(queue, dict) or not queue.keys() >= {"left", "told"}:
            raise ValueError("has an island without batches")
        counts += _runs(queue["left"])
        for told in _items(queue["told"], 1):
            round_, runs, _ = _items(told, 3)
            counts += [round_, *_runs(runs)]
    if any(type(count) is not int or not -(1 << 62) < count < 1 << 62 for count in counts):
        raise ValueError("has islands with counts that are none")


def _items(value: object, least: int) -> list[Any]:
    if not isinstance(value, list) or (least > 1 and len(value) != least):
        raise ValueError("has islands with lists that are none")
    return value


def _runs(value: object) -> list[Any]:
    """The numbers in runs of batches."""
    return [number for run in _items(value, 1) for number in _items(run, 3)]
