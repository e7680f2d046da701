"""The memory of all nodes, as one rank sees it: who is where, and how they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.memory.copies import ranks_by_node
from cuboid.checkpoint.memory.folder import identity_of, node_name, open_folder
from cuboid.parallel.coordination import Coordination
from cuboid.spec.run import Run


@dataclass(frozen=True)
class Memory:
    folder: Location
    """Of this rank's node and run."""
    node: str
    neighbours: tuple[int, ...]
    """The ranks of this node, this one among them."""
    rank: int
    nodes: tuple[str, ...]
    """The node of each rank: on rank 0 alone, which plans for all; told to every rank it would grow with the square of
    the ranks."""

    @property
    def leads(self) -> bool:
        """Whether this rank does for its node what is done once."""
        return self.neighbours[0] == self.rank


def open_memory(run: Run, rank: int, group: Coordination, node: str = "") -> Memory:
    """Every rank calls this. `node`: as the system or the supervisor names it, unless it is given."""
    own = node or node_name()
    identity = group.broadcast(identity_of(run, make=True) if rank == 0 else "")
    folder = open_folder(run, identity, own)
    return join_nodes(folder, own, group)


def join_nodes(folder: Location, node: str, group: Coordination) -> Memory:
    """Every rank calls this with its own node and that node's folder."""
    nodes = tuple(group.gather(node))
    together = {name: tuple(ranks) for name, ranks in ranks_by_node(nodes).items()}
    return Memory(folder, node, group.scatter([together[name] for name in nodes]), group.rank, nodes)


# Connections between two ranks that copy parts of the state to each other: gloo, as large as needed and no larger.


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
