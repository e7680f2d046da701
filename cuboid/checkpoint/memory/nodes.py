"""The memory of all nodes, as one rank sees it: who is where, and how they agree."""

from __future__ import annotations

from dataclasses import dataclass

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
