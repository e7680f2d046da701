"""The memory of all nodes, as one rank sees it: who is where, and how they agree."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.memory.copies import ranks_by_node
from cuboid.checkpoint.memory.folder import identity_of, node_name, open_folder
from cuboid.resilience.pulse import PULSE
from cuboid.spec.run import Run

Answer = TypeVar("Answer")


def _noted() -> AbstractContextManager[None]:
    """That this rank waits, unless it is only the thread of a save."""
    alone = threading.current_thread() is not threading.main_thread()
    return nullcontext() if alone else PULSE.everybody().joined("agreement")


def gather(own: Answer, group: dist.ProcessGroup | None) -> list[Answer]:
    """What every rank says, in order; returns when all have said it."""
    if group is None:
        return [own]
    answers: list[Answer] = [own] * dist.get_world_size(group)
    with _noted():
        dist.all_gather_object(answers, own, group=group)
    return answers


def from_rank(source: int, own: Answer, group: dist.ProcessGroup | None) -> Answer:
    """What one rank says."""
    answer = [own]
    if group is not None:
        with _noted():
            dist.broadcast_object_list(answer, src=source, group=group)
    return answer[0]


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


def open_memory(run: Run, rank: int, group: dist.ProcessGroup | None, node: str = "") -> Memory:
    """Every rank calls this. `node`: left out, as the system or the supervisor names it."""
    identity = identity_of(run, make=True) if rank == 0 else ""
    told = gather((node or node_name(), identity), group)
    return Memory(open_folder(run, told[0][1], node), tuple(name for name, _ in told), rank)
