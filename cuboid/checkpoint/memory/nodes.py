"""The memory of all nodes, as one rank sees it: who is where, and how they agree."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import data_file
from cuboid.checkpoint.memory.folder import identity_of, node_name, open_folder
from cuboid.parallel.coordination import Coordination
from cuboid.secure_channel import found_secret
from cuboid.spec.run import Run

# Who keeps a copy of whose part, and what can be restored from the nodes that are left: pure rules.


class Generation(NamedTuple):
    """A state kept in memory; newer ones are larger. Two attempts may keep the same step on two layouts, whose parts do
    not mix: the checksum of what their manifests share tells them apart."""

    step: int
    digest: str


@dataclass(frozen=True)
class Held:
    """What one node has of one generation."""

    ranks: int
    """Of the job that kept it: each has one file."""
    present: frozenset[str]

    @property
    def expected(self) -> frozenset[str]:
        """All files of the generation but those in which a node says what it has."""
        return frozenset(map(data_file, range(self.ranks)))


Holdings = Mapping[str, Mapping[Generation, Held]]
"""By node, of the nodes that can be reached."""


@dataclass(frozen=True)
class Transfer:
    file: str
    source: int
    target: int
    """Ranks."""


def ranks_by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    """`nodes`: that of each rank. In the order of each node's first rank."""
    result: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        result.setdefault(node, []).append(rank)
    return result


def peers(nodes: Sequence[str]) -> list[int | None]:
    """For each rank, the one that keeps a copy of its part: its like on the next node; None where there is only one.

    >>> peers(["a", "a", "b", "b"])
    [2, 3, 0, 1]
    """
    by_node = ranks_by_node(nodes)
    names = list(by_node)
    result: list[int | None] = [None] * len(nodes)
    for index, name in enumerate(names if len(names) > 1 else ()):
        others = by_node[names[(index + 1) % len(names)]]
        for position, rank in enumerate(by_node[name]):
            result[rank] = others[position % len(others)]
    return result


def parts_kept(nodes: Sequence[str]) -> dict[str, list[int]]:
    """For each node the ranks whose parts lie there: its own, and those it keeps copies for.

    >>> parts_kept(["a", "b", "c"])
    {'a': [0, 2], 'b': [1, 0], 'c': [2, 1]}
    """
    result = ranks_by_node(nodes)
    for rank, checkpointer in enumerate(peers(nodes)):
        if checkpointer is not None:
            result[nodes[checkpointer]].append(rank)
    return result


def holders(holdings: Holdings, generation: Generation) -> dict[str, list[str]]:
    """File -> the nodes that have it."""
    result: dict[str, list[str]] = {}
    for node, held in holdings.items():
        for file in sorted(held[generation].present if generation in held else ()):
            result.setdefault(file, []).append(node)
    return result


def known(holdings: Holdings, newest: int) -> list[Generation]:
    """Newest first; none of a step after `newest`."""
    return sorted({one for held in holdings.values() for one in held if one.step <= newest}, reverse=True)


def missing(holdings: Holdings, generation: Generation) -> list[str]:
    """The files of a generation that no node has; it can be used if there is none."""
    expected = next(held[generation].expected for held in holdings.values() if generation in held)
    return sorted(expected - holders(holdings, generation).keys())


def transfers(
    nodes: Sequence[str], needed: Mapping[str, frozenset[str]], held: Mapping[str, Sequence[str]]
) -> list[Transfer]:
    """What brings each node the files it needs (`needed`, by node) from those that have them (`held`, by file), spread
    over nodes and their ranks. The order is the same for everybody, so that nobody waits in a circle."""
    by_node = ranks_by_node(nodes)
    busy: Counter[int] = Counter()

    def idlest(ranks: Sequence[int]) -> int:
        chosen = min(ranks, key=lambda rank: busy[rank])
        busy[chosen] += 1
        return chosen

    result = []
    for node in by_node:
        for file in sorted(needed.get(node, frozenset())):
            if node not in held[file]:
                source = idlest([rank for holder in held[file] for rank in by_node[holder]])
                result.append(Transfer(file, source, idlest(by_node[node])))
    return result


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
    secret: bytes = b""
    """The job's; empty: it has none."""

    @property
    def leads(self) -> bool:
        """Whether this rank does for its node what is done once."""
        return self.neighbours[0] == self.rank


def open_memory(run: Run, rank: int, group: Coordination, node: str = "") -> Memory:
    """Every rank calls this. `node`: as the system or the supervisor names it, unless it is given."""
    own = node or node_name()
    identity = group.broadcast(identity_of(run, make=True) if rank == 0 else "")
    folder = open_folder(run, identity, own)
    secret = found_secret(os.environ, Path(run.output.folder))
    return join_nodes(folder, own, group, secret or b"")


def join_nodes(folder: Location, node: str, group: Coordination, secret: bytes = b"") -> Memory:
    """Every rank calls this with its own node and that node's folder."""
    nodes = tuple(group.gather(node))
    together = {name: tuple(ranks) for name, ranks in ranks_by_node(nodes).items()}
    return Memory(folder, node, group.scatter([together[name] for name in nodes]), group.rank, nodes, secret)
