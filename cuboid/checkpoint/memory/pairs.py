"""Connections between two ranks that copy parts of the state to each other: gloo, as large as needed and no larger."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cuboid.checkpoint.memory.copies import ranks_by_node
from cuboid.parallel.coordination import Coordination


class Pairs:
    """A rank is connected to those it has called `connect` for, which call it too."""

    def __init__(self, group: Coordination, nodes: Sequence[str]) -> None:
        """`nodes`: that of each rank."""
        self._group = group
        self._nodes = nodes
        self._links: dict[int, Any] = {}
        self._number = 0

    def connect(self, others: Sequence[int]) -> None:
        """In one order of all pairs, so that no ranks wait in a circle; pairs that begin at every other node come
        first, so that no more than a few wait for one another."""
        position = {node: number for number, node in enumerate(ranks_by_node(self._nodes))}

        def order(pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
            return position[self._nodes[pair[0]]] % 2, pair

        own = self._group.rank
        for low, high in sorted({(min(own, other), max(own, other)) for other in others}, key=order):
            other = high if own == low else low
            if other not in self._links:
                store = dist.PrefixStore(f"pair/{self._number}/{low}-{high}", self._group.store)  # type: ignore[attr-defined]
                limit = timedelta(seconds=self._group.seconds)
                self._links[other] = dist.ProcessGroupGloo(store, int(own == high), 2, limit)

    def break_off(self) -> None:
        """After a failure all ranks connect anew."""
        self._links.clear()
        self._number += 1

    def send(self, content: Tensor, other: int) -> Any:
        """Work to wait for."""
        return self._links[other].send([content], int(self._group.rank < other), 0)

    def receive(self, content: Tensor, other: int) -> Any:
        return self._links[other].recv([content], int(self._group.rank < other), 0)
