"""The memory of all nodes, as one rank sees it: who is where, and how they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.memory.copies import ranks_by_node
from cuboid.checkpoint.memory.folder import identity_of, node_name, open_folder
from cuboid.parallel.coordination import Coordination
from cuboid.spec.run import Run

Answer = TypeVar("Answer")


def gather(own: Answer, group: Coordination) -> list[Answer]:
    """What every rank says, in order; returns when all have said it."""
    return group.broadcast(group.gather(own))


def from_rank(source: int, own: Answer, group: Coordination) -> Answer:
    """What one rank says."""
    return gather(own if group.rank == source else None, group)[source] if source else group.broadcast(own)  # type: ignore[return-value]


@dataclass(frozen=True)
class Memory:
    folder: Location
    """Of this rank's node and run."""
    nodes: tuple[str, ...]
    """The node of each rank."""
    rank: int

    @property
    def node(self) -> str:
        return self.nodes[self.rank]

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this node, this one among them."""
        return ranks_by_node(self.nodes)[self.node]

    @property
    def leads(self) -> bool:
        """Whether this rank does for its node what is done once."""
        return self.neighbours[0] == self.rank


def open_memory(run: Run, rank: int, group: Coordination, node: str = "") -> Memory:
    """Every rank calls this. `node`: left out, as the system or the supervisor names it."""
    identity = identity_of(run, make=True) if rank == 0 else ""
    told = gather((node or node_name(), identity), group)
    return Memory(open_folder(run, told[0][1], node), tuple(name for name, _ in told), rank)
