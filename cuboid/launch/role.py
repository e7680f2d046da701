"""What this process is in the job: all of it, a rank that somebody started, or the supervisor of one node of many."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuboid.checkpoint.memory.folder import NODE
from cuboid.launch.network import listen_if_host
from cuboid.launch.nodes import NodeOptions, Nodes, find_nodes
from cuboid.launch.place import Place, find_place
from cuboid.launch.training import start_training
from cuboid.spec.run import Run

if TYPE_CHECKING:
    from cuboid.train.trainer import Outcome


@dataclass(frozen=True)
class Role:
    run: Run
    place: Place | None = None
    nodes: Nodes | None = None
    listener: socket.socket | None = None
    """Of the node that leads."""

    @property
    def speaks(self) -> bool:
        """Whether this process tells of the job, and prepares what it writes. Rank 0 belongs to it."""
        if self.nodes is not None:
            return self.listener is not None
        return self.place is None or self.place.rank == 0


@dataclass(frozen=True)
class TrainingRole(Role):
    @property
    def fewest_nodes(self) -> int:
        """With which the job continues."""
        if self.nodes is not None:
            return self.nodes.least
        return max(1, self.place.world_size // self.place.local_world_size) if self.place else 1

    def train(self, quiet: bool) -> Outcome:
        if self.nodes is None:
            return start_training(self.run, quiet)
        from cuboid.launch.node import supervise_node

        return supervise_node(self.run, self.nodes, self.listener, quiet)


def take_role(run: Run, options: NodeOptions) -> TrainingRole:
    """Refuses in one sentence what cannot work; of many nodes the one at the rendezvous listens there when this
    returns."""
    nodes = find_nodes(run, options)
    if nodes is None:
        return TrainingRole(run, place=find_place(os.environ))
    os.environ.setdefault(NODE, nodes.interface.address)  # which stays the same when this process is started again
    return TrainingRole(run, nodes=nodes, listener=listen_if_host(nodes.endpoint, nodes.interface))
