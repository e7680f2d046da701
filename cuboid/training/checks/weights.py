"""Whole weights, gathered from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.collectives import all_gather
from cuboid.parallel.groups import Group
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import Unit
from cuboid.spec.sharding import EXPERTS, Part


class WholeWeights:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parts: dict[str, list[list[Part]]] = {}
        """By unit: the parts of each rank. Ranks communicate them once."""

    def gather(self, prefix: str, names: Collection[str]) -> tuple[dict[str, Tensor], dict[str, list[Part]]]:
        """By their names these weights and all that belong to a block `prefix`, and every slice of each that some rank
        holds. All ranks of a stage call this."""
        found: dict[str, Tensor] = {}
        slices: dict[str, list[Part]] = {}
        for unit in self._engine.units:
            if any(part.name in names or part.name.startswith(f"{prefix}.") for part in unit.parts):
                held, rows = self._parts_of(unit), self._gathered(unit)
                for parts, row in zip(held, rows, strict=True):
                    for part in parts:
                        _place(found, part, row)
                        others = slices.setdefault(part.name, [])
                        if all(other.slice != part.slice for other in others):
                            others.append(part)
        return found, slices

    def _group(self, unit: Unit) -> Group:
        return self._engine.groups.expert if unit.name.endswith(EXPERTS) else self._engine.groups.tensor

    def _gathered(self, unit: Unit) -> Tensor:
        unit.gather()
        flat = torch.cat([unit.parameters[part.name].detach().flatten() for part in unit.parts])
        unit.release()
        return all_gather(flat.unsqueeze(0), self._group(unit))

    def _parts_of(self, unit: Unit) -> list[list[Part]]:
        if unit.name not in self._parts:
            group = self._group(unit)
            parts: list[list[Part]] = [unit.parts] * group.size
            if group.handle is not None:
                dist.all_gather_object(parts, unit.parts, group=group.handle)
            self._parts[unit.name] = parts
        return self._parts[unit.name]


def _place(found: dict[str, Tensor], part: Part, row: Tensor) -> None:
    """`row`: the flat weights of a unit, one after another."""
    cut = part.slice
    whole = found.setdefault(part.name, row.new_zeros(part.full_shape))
    real = row[part.offset : part.offset + part.size].view(part.shape).narrow(cut.dimension, 0, cut.stop - cut.start)
    whole.narrow(cut.dimension, cut.start, cut.stop - cut.start).copy_(real)


def part_of(whole: Tensor, part: Part) -> Tensor:
    """What a rank holds of a whole tensor, with its padding."""
    cut = part.slice
    padded = whole.new_zeros(part.shape)
    count = cut.stop - cut.start
    padded.narrow(cut.dimension, 0, count).copy_(whole.narrow(cut.dimension, cut.start, count))
    return padded
