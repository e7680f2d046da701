"""The memory of all nodes, as one rank sees it: who is where, and how they agree."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeVar

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.memory.copies import ranks_by_node
from cuboid.checkpoint.memory.folder import identity_of, node_name, open_folder
from cuboid.parallel.coordination import Coordination
from cuboid.spec.run import Run

Answer = TypeVar("Answer")


def from_rank(source: int, own: Answer, group: Coordination) -> Answer:
    """What one rank says."""
    told = group.gather(own if group.rank == source else None)
    answer: Answer = group.broadcast(told[source] if told else None)  # type: ignore[assignment]
    return answer


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
    told = group.gather(node or node_name())
    names = {name: number for number, name in enumerate(dict.fromkeys(told))}
    # Each name once: a rank is a number of two bytes in what is told to every other.
    names, numbers, identity = group.broadcast((names, array("H", (names[name] for name in told)), identity))
    known = list(names)
    return Memory(open_folder(run, identity, node), tuple(known[number] for number in numbers), rank)
