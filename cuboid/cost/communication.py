"""How long collectives and transfers take, by the links they use and the number of nodes they span."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.constants import Fabric
from cuboid.cost.inputs import Array

ONE = np.ones(())


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, how far apart in rank order, and so how many share a node."""

    size: Array
    local: Array
    """Members on one node."""
    nodes: Array


def group(fabric: Fabric, size: Array, stride: Array) -> Group:
    """The group of `size` ranks that are `stride` apart."""
    local = np.clip(fabric.node / stride, 1.0, size)
    return Group(size, local, size / local)


def _curve(points: list[float] | None, nodes: Array) -> Array | None:
    """Something measured over whole nodes, interpolated between powers of two and held flat beyond."""
    if points is None:
        return None
    return np.exp(np.interp(np.log2(np.maximum(nodes, 1.0)), np.arange(len(points)), np.log(points)))


def bus_bandwidth(fabric: Fabric, kind: str, members: Group) -> Array:
    """Bytes per second at which a ring over the group moves data past each rank."""
    measured = _curve(fabric.curve.get(kind), members.nodes)
    whole = (members.local <= 1) | (members.local >= fabric.node)
    share = np.where(whole, 1.0, fabric.partial)
    if measured is not None:
        # Groups that hold fewer ranks of a node share its network ports with the node's other groups.
        outside = 1e9 * measured * members.local / fabric.node * share
        return np.where(members.nodes > 1, np.minimum(outside, 1e9 * measured), fabric.inner_bandwidth)
    outside = share * members.local * fabric.outer_bandwidth * np.maximum(members.nodes / 2, 1.0) ** -fabric.decay
    return np.where(members.nodes > 1, np.minimum(outside, fabric.inner_bandwidth), fabric.inner_bandwidth)


def _latency(fabric: Fabric, kind: str, members: Group, growth: float = 1.0) -> Array:
    """Seconds before bytes count: a ring visits every node in turn, a tree reaches them in fewer steps."""
    steps = fabric.inner_latency * (members.local - 1) + fabric.outer_latency * (members.nodes - 1) ** growth
    measured = _curve(fabric.delay.get(kind), members.nodes)
    if measured is None:
        return steps
    # Measured with all ranks of the nodes; a group with fewer has less to go through.
    return np.where(members.nodes > 1, measured * members.local / fabric.node, steps)


def all_reduce(fabric: Fabric, size: Array, members: Group) -> Array:
    """Seconds to sum `size` bytes over the group."""
    ring = 2 * (members.size - 1) / members.size * size / bus_bandwidth(fabric, "all_reduce", members)
    return np.where(members.size > 1, ring + 2 * _latency(fabric, "all_reduce", members, 0.7), 0.0)


def all_gather(fabric: Fabric, size: Array, members: Group) -> Array:
    """Seconds to gather `size` bytes in all, or to reduce and scatter them."""
    return _one_way(fabric, size, members, "all_gather")


def reduce_scatter(fabric: Fabric, size: Array, members: Group) -> Array:
    """Seconds to sum `size` bytes and keep a part; as long as gathering them, where nobody measured it."""
    return _one_way(fabric, size, members, "reduce_scatter" if "reduce_scatter" in fabric.curve else "all_gather")


def _one_way(fabric: Fabric, size: Array, members: Group, kind: str) -> Array:
    ring = (members.size - 1) / members.size * size / bus_bandwidth(fabric, kind, members)
    return np.where(members.size > 1, ring + _latency(fabric, kind, members), 0.0)


def all_to_all(fabric: Fabric, size: Array, members: Group, outside: Array) -> Array:
    """Seconds for every rank to spread its `size` bytes over the group, `outside` of them to other nodes."""
    inside = size * (members.local - 1) / members.size / fabric.inner_bandwidth
    port = fabric.outer_bandwidth * np.maximum(members.nodes / 2, 1.0) ** -fabric.decay
    slower = np.maximum(inside, np.where(members.nodes > 1, outside / port, 0.0))
    return np.where(members.size > 1, slower + _latency(fabric, "all_to_all", members), 0.0)


def transfer(fabric: Fabric, size: Array, crosses: Array, senders: Array = ONE) -> Array:
    """Seconds to send `size` bytes from one stage to the next. `crosses`: the share of such hops that leave a node;
    `senders`: ranks of a node that then send at once."""
    inside = size / fabric.inner_bandwidth + fabric.inner_latency
    port = np.clip(fabric.alone / senders, fabric.outer_bandwidth, None)
    outside = size / port + fabric.outer_latency
    return crosses * outside + (1 - crosses) * inside
