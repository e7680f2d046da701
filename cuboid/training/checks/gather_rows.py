"""An all-gather of rows of numbers, where each rank has rows under names of its own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.collectives import start_all_gather
from cuboid.parallel.parallelize import Engine

Rows = dict[Any, Tensor]
"""By what names them: (numbers,) in float64, on the CPU."""


class RowGather:
    """Ranks communicate the names once and the numbers at each check: the rows are the same from step to step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names: list[list[Hashable]] = []

    def gather(self, rows: Mapping[Any, Tensor], width: int) -> list[Rows]:
        """Every rank calls this with its rows, each of `width` numbers, and gets those of all ranks in their order."""
        world, device = self._engine.groups.world, self._engine.device
        names = list(rows)
        own = torch.stack(list(rows.values())).double() if rows else torch.zeros(0, width, dtype=torch.float64)
        own = own.to(device).view(len(rows), width)
        if world.handle is None:
            return [dict(zip(names, own.cpu(), strict=True))]
        changed = not self._names or self._names[world.index] != names
        sizes = torch.tensor([len(rows), int(changed)], device=device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=world.handle)
        most, anywhere = sizes.tolist()
        if anywhere:
            self._names = [[] for _ in range(world.size)]
            dist.all_gather_object(self._names, names, group=world.handle)
        # An all-gather takes equal shapes: ranks with fewer rows fill up.
        table = torch.zeros(most, width, dtype=torch.float64, device=device)
        table[: len(rows)] = own
        everything = start_all_gather(table, world).wait().view(world.size, most, width).cpu()
        return [dict(zip(each, numbers, strict=False)) for each, numbers in zip(self._names, everything, strict=True)]
