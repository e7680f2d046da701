"""What islands send to one another over the links of a cluster file, and how long that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.rounds import transfer_seconds
from cuboid.spec.block_owners import ANSWER, FRAME, REQUEST, messages, runs_of_ranks
from cuboid.spec.groups import Group, Groups
from cuboid.spec.islands import IslandsSpec, fragments_of
from cuboid.spec.model import ModelSpec
from cuboid.spec.run import Run


def fragment_bytes(spec: IslandsSpec, model: ModelSpec, precision: str = "bf16") -> list[int]:
    """Of the blocks of each fragment: what one island sends to another but for questions and framing."""
    size = spec.block_bytes(precision)
    return [size * fragment.blocks for fragment in fragments_of(model, spec.fragments)]


@dataclass(frozen=True)
class Sent:
    """What one island sends to another one for a round."""

    bytes: int
    connections: int
    """Between their ranks."""


Homes = NDArray[np.int64]
"""Runs of blocks of a fragment in order, none overlap: a row of first blocks, one of those behind the last, one of
ranks."""


def homes_of(run: Run, fragment: int) -> Homes:
    runs = [(*each, rank) for rank, own in enumerate(runs_of_ranks(run, fragment)) for each in own]
    found = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return found[:, np.argsort(found[0], kind="stable")]


def sent_between(here: Homes, there: Homes, block_bytes: int) -> Sent:
    """The sum over all ranks of what `block_owners.wire_bytes` says of one: an answer for each run of blocks that has
    one owner here and one there."""
    edges = np.unique(np.concatenate([here[:2].ravel(), there[:2].ravel()]))
    first, blocks = edges[:-1], np.diff(edges)
    owners, held = [], np.ones(len(first), dtype=bool)
    for homes in (here, there):
        place = np.searchsorted(homes[0], first, side="right") - 1
        held &= (place >= 0) & (first < homes[1][place])
        owners.append(homes[2][place])
    total = 0
    for size, answers in zip(*np.unique(blocks[held], return_counts=True), strict=True):
        frames = 2 + messages(int(size), block_bytes)  # those of the question and of the answer's head too
        total += int(answers) * (REQUEST + ANSWER + FRAME * frames + int(size) * block_bytes)
    return Sent(total, np.unique(np.stack(owners)[:, held], axis=1).shape[1])


@dataclass(frozen=True)
class Paths:
    """The links that the traffic of some groups crosses, each an island."""

    groups: Groups
    members: tuple[Group, ...]

    def seconds(self, sent: Sequence[Sequence[Sent]]) -> float:
        """Until all have fetched from all others. `sent`: by sender, then by receiver."""
        of_link: Counter[frozenset[str]] = Counter()
        of_uplink: Counter[str] = Counter()
        connections: Counter[frozenset[str] | str] = Counter()
        for source, group in enumerate(self.members):
            for target, other in enumerate(self.members):
                if source == target:
                    continue
                pair, own = frozenset((group.site, other.site)), sent[source][target]
                if source < target:  # a link carries as much in the other direction
                    of_link[pair] += own.bytes
                    connections[pair] += own.connections
                if len(pair) == 2:
                    of_uplink[group.site] += own.bytes
                    connections[group.site] += own.connections
        found = []
        for first, second in combinations(self.members, 2):
            link, pair = self.groups.link(first, second), frozenset((first.site, second.site))
            found.append(transfer_seconds(of_link[pair], link.rate, link.latency, connections[pair]) + link.latency)
        for group in self.members:
            rate = self.groups.uplink(group)
            if rate is not None and of_uplink[group.site]:
                latency = self._farthest(group)
                seconds = transfer_seconds(of_uplink[group.site], rate, latency, connections[group.site])
                found.append(seconds + latency)
        return max(found)

    def _farthest(self, group: Group) -> float:
        """Seconds to the island that is farthest from one."""
        return max(self.groups.link(group, other).latency for other in self.members if other is not group)

    @property
    def coordinator(self) -> Group:
        """The island where all should meet: the one nearest to the farthest other."""
        return min(self.members, key=self._farthest)

    @property
    def decide(self) -> float:
        """Seconds to there and back."""
        return 2 * self._farthest(self.coordinator)
