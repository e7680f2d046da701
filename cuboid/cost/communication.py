"""How long collectives and transfers take, by the links they use and the number of nodes they span."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuboid.cost.constants import Fabric
from cuboid.cost.inputs import Array, Jobs
from cuboid.cost.reuse import recent

ONE = np.ones(())


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, how far apart in rank order, and so how many share a node."""

    size: Array
    local: Array
    """Members on one node."""
    nodes: Array
    within: tuple[Array, ...] = ()
    """Members in one domain below each of the fabric's further levels."""


@recent
def group(fabric: Fabric, size: Array, stride: Array) -> Group:
    """The group of `size` ranks that are `stride` apart."""
    local = np.clip(fabric.node / stride, 1.0, size)
    within = tuple(np.clip(level.inside / stride, 1.0, size) for level in fabric.further)
    return Group(size, local, size / local, within)


@dataclass(frozen=True)
class Links:
    """Seconds for which something holds the links inside a node, and those between nodes."""

    inside: Array
    outside: Array

    @classmethod
    def of(cls, members: Group, seconds: Array) -> "Links":
        """Those of a group: the links that it is as slow as."""
        return cls(np.where(members.nodes > 1, 0.0, seconds), np.where(members.nodes > 1, seconds, 0.0))

    def __add__(self, other: "Links") -> "Links":
        return Links(self.inside + other.inside, self.outside + other.outside)

    def times(self, number: Array | float) -> "Links":
        """So often."""
        return Links(self.inside * number, self.outside * number)


def one_port(members: Group) -> Group:
    """The group as messages from neighbour to neighbour see it: out of a node they have one port."""
    return replace(members, local=np.where(members.nodes > 1, 1.0, members.local))


def _curve(points: list[float] | None, nodes: Array) -> Array | None:
    """Something measured over whole nodes, interpolated between powers of two and held flat beyond."""
    if points is None:
        return None
    return np.exp(np.interp(np.log2(np.maximum(nodes, 1.0)), np.arange(len(points)), np.log(points)))


def _inside(fabric: Fabric, local: Array) -> Array:
    """Bytes per second past each of so many members on one node."""
    links = np.maximum(local - 1, 1.0) / (fabric.node - 1) if fabric.mesh else ONE
    return fabric.inner_bandwidth * links


@recent
def bus_bandwidth(fabric: Fabric, kind: str, members: Group) -> Array:
    """Bytes per second at which a ring over the group moves data past each rank."""
    measured = _curve(fabric.curve.get(kind), members.nodes)
    inside = _inside(fabric, members.local)
    whole = (members.local <= 1) | (members.local >= fabric.node)
    fraction = np.where(whole, 1.0, fabric.partial)
    if measured is not None:
        # Groups that hold fewer ranks of a node share its network ports with the node's other groups.
        outside = 1e9 * measured * members.local / fabric.node * fraction
        outside = np.minimum(outside, 1e9 * measured)
        return np.where(members.nodes > 1, _narrowest(fabric, outside, members), inside)
    outside = fraction * members.local * fabric.outer_bandwidth * np.maximum(members.nodes / 2, 1.0) ** -fabric.decay
    outside = _narrowest(fabric, outside, members)
    return np.where(members.nodes > 1, np.minimum(outside, fabric.inner_bandwidth), inside)


def _narrowest(fabric: Fabric, bandwidth: Array, members: Group) -> Array:
    """The least of a bandwidth and those of the further levels that the group crosses: all members in a domain send
    out of it at once, each at its own part of the level's links."""
    for level, within in zip(fabric.further, members.within, strict=True):
        out = within * level.bandwidth * np.maximum(members.size / within / 2, 1.0) ** -fabric.decay
        bandwidth = np.where(members.size > within, np.minimum(bandwidth, out), bandwidth)
    return bandwidth


def _hop_latency(fabric: Fabric, members: Group) -> Array:
    """Seconds of a hop between two nodes of a ring over the group, on average."""
    hops = np.maximum(members.nodes - 1, 1.0)
    latency = np.asarray(fabric.outer_latency)
    below = fabric.outer_latency
    for level, within in zip(fabric.further, members.within, strict=True):
        latency = latency + (level.latency - below) * (members.size / within - 1) / hops
        below = level.latency
    return latency


@recent
def _latency(fabric: Fabric, kind: str, members: Group, growth: float = 1.0) -> Array:
    """Seconds before bytes count: a ring visits every node in turn, a tree reaches them in fewer steps."""
    outer = _hop_latency(fabric, members) if fabric.further else fabric.outer_latency
    steps = fabric.inner_latency * (members.local - 1) + outer * (members.nodes - 1) ** growth
    measured = _curve(fabric.delay.get(kind), members.nodes)
    if measured is None:
        return steps
    # Measured with all ranks of the nodes; a group with fewer has less to go through.
    return np.where(members.nodes > 1, measured * members.local / fabric.node, steps)


def all_reduce(fabric: Fabric, size: Array, members: Group) -> Array:
    """Seconds to sum `size` bytes over the group."""
    ring = 2 * (members.size - 1) / members.size * size / bus_bandwidth(fabric, "all_reduce", members)
    return np.where((members.size > 1) & (size > 0), ring + 2 * _latency(fabric, "all_reduce", members, 0.7), 0.0)


def all_gather(fabric: Fabric, size: Array, members: Group) -> Array:
    """Seconds to gather `size` bytes in all, or to reduce and scatter them."""
    return _one_way(fabric, size, members, "all_gather")


def reduce_scatter(fabric: Fabric, size: Array, members: Group) -> Array:
    """Seconds to sum `size` bytes and keep a part; as long as gathering them, where nobody measured it."""
    return _one_way(fabric, size, members, "reduce_scatter" if "reduce_scatter" in fabric.curve else "all_gather")


def _one_way(fabric: Fabric, size: Array, members: Group, kind: str) -> Array:
    ring = (members.size - 1) / members.size * size / bus_bandwidth(fabric, kind, members)
    return np.where((members.size > 1) & (size > 0), ring + _latency(fabric, kind, members), 0.0)


def all_to_all(fabric: Fabric, size: Array, members: Group, outside: Array) -> Array:
    """Seconds for every rank to spread its `size` bytes over the group, `outside` of them to other nodes."""
    inside = size * (members.local - 1) / members.size / _inside(fabric, members.local)
    slower = np.maximum(inside, np.where(members.nodes > 1, outside / _port(fabric, members), 0.0))
    return np.where(members.size > 1, slower + _latency(fabric, "all_to_all", members), 0.0)


def _port(fabric: Fabric, members: Group) -> Array:
    """Bytes per second at which one rank sends to all other nodes of the group at once."""
    port = fabric.outer_bandwidth * np.maximum(members.nodes / 2, 1.0) ** -fabric.decay
    apart = np.maximum(1 - members.local / members.size, 1e-12)
    for level, within in zip(fabric.further, members.within, strict=True):
        # Of what leaves the node, only a part leaves this domain too.
        fraction = np.maximum(1 - within / members.size, 1e-12) / apart
        out = level.bandwidth * np.maximum(members.size / within / 2, 1.0) ** -fabric.decay / fraction
        port = np.where(members.size > within, np.minimum(port, out), port)
    return port


def crossing(inside: int, jobs: Jobs) -> Array:
    """Of the hops from one pipeline rank to the next the fraction that leaves a domain of so many accelerators."""
    between = (jobs.world_size / inside - 1) / np.maximum(jobs.pp - 1, 1)
    return np.where(jobs.pp > 1, np.clip(between, 0.0, 1.0), 0.0)


def stage_transfer(fabric: Fabric, size: Array, jobs: Jobs) -> Array:
    """Seconds to send `size` bytes from each rank to the next stage, on average over the stages."""
    senders = np.minimum(jobs.world_size / jobs.pp, fabric.node) if fabric.alone else ONE
    further = [crossing(level.inside, jobs) for level in fabric.further]
    return transfer(fabric, size, crossing(fabric.node, jobs), senders, further)


def transfer(fabric: Fabric, size: Array, crosses: Array, senders: Array = ONE, further: Sequence[Array] = ()) -> Array:
    """Seconds to send `size` bytes from one stage to the next. `crosses`: the fraction of such hops that leave a node;
    `senders`: ranks of a node that then send at once; `further`: the fractions that cross each further level."""
    inside = size / _inside(fabric, ONE) + fabric.inner_latency
    port = np.clip(fabric.alone / senders, fabric.outer_bandwidth, None)
    outside = size / port + fabric.outer_latency
    seconds = crosses * outside + (1 - crosses) * inside
    for level, fraction in zip(fabric.further, further, strict=bool(further)):
        slower = np.maximum(size / level.bandwidth - size / port, 0.0) + level.latency - fabric.outer_latency
        seconds = seconds + fraction * np.maximum(slower, 0.0)
    return seconds
