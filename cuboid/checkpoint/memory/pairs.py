"""Connections between two ranks that copy parts of the state to each other: gloo, as large as needed and no larger."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.coordination import Coordination


class Pairs:
    """A rank is connected to those it has called `connect` for, which call it too."""

    def __init__(self, group: Coordination) -> None:
        self._group = group
        self._links: dict[int, Any] = {}
        self._number = 0

    def connect(self, others: Sequence[int]) -> None:
        """In one order of all pairs, so that no ranks wait in a circle. The order looks random: in that of the ranks
        each node would wait for the one before it."""
        own = self._group.rank
        names = {f"{min(own, other)}-{max(own, other)}": other for other in others}
        for name in sorted(names, key=lambda name: (crc32(name.encode()), name)):
            other = names[name]
            if other not in self._links:
                store = dist.PrefixStore(f"pair/{self._number}/{name}", self._group.store)  # type: ignore[attr-defined]
                limit = timedelta(seconds=self._group.seconds)
                self._links[other] = dist.ProcessGroupGloo(store, int(own > other), 2, limit)

    def break_off(self) -> None:
        """After a failure all ranks connect anew."""
        self._links.clear()
        self._number += 1

    def send(self, content: Tensor, other: int) -> Any:
        """Work to wait for."""
        return self._links[other].send([content], int(self._group.rank < other), 0)

    def receive(self, content: Tensor, other: int) -> Any:
        return self._links[other].recv([content], int(self._group.rank < other), 0)
