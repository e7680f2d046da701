"""The same cluster with fewer or more accelerators."""

from dataclasses import replace

from cuboid.planning.question import Question
from cuboid.spec.cluster import ClusterSpec

FEW_NODES = 12
"""Clusters so small that every part of them is tried."""


def resized_cluster(cluster: ClusterSpec, accelerators: int) -> ClusterSpec:
    """The cluster with so many accelerators: whole nodes, or a part of one."""
    per_node = min(cluster.accelerators_per_node, accelerators)
    tiers = []
    for tier in cluster.tiers:
        last = tier is cluster.tiers[-1] or tier.size >= accelerators
        tiers.append(replace(tier, size=accelerators if last else tier.size))
        if last:
            break
    name = cluster.name.rpartition("x")[0] or cluster.accelerator
    return replace(
        cluster,
        name=f"{name}x{accelerators}",
        nodes=accelerators // per_node,
        accelerators_per_node=per_node,
        tiers=tuple(tiers),
    )


def resized(question: Question, accelerators: int) -> Question:
    """The question for so many accelerators."""
    if accelerators == question.cluster.accelerators:
        return question
    return replace(question, cluster=resized_cluster(question.cluster, accelerators))


def sizes(cluster: ClusterSpec) -> list[int]:
    """Parts of the cluster worth a look: 1, 2, 3, 4, 6, 8, 12, … nodes and the whole, and parts of one node."""
    node = cluster.accelerators_per_node
    found = {cluster.accelerators}
    power = 1
    while power <= cluster.accelerators:
        found |= {size for size in (power, 3 * power) if size <= cluster.accelerators and _fits(size, node)}
        power *= 2
    return sorted(found)


def every_size(cluster: ClusterSpec) -> list[int]:
    """All parts of the cluster: any number of accelerators of one node, or any number of nodes."""
    node = cluster.accelerators_per_node
    return [*range(1, node), *range(node, cluster.accelerators + 1, node)]


def rounder_sizes(cluster: ClusterSpec, global_batch: int) -> list[int]:
    """Smaller parts of the cluster that might be faster, largest first: all of a small one; of others, as a rule, more
    than half of it, where ranks or the batch divide over that better."""
    whole, node = cluster.accelerators, cluster.accelerators_per_node
    if whole <= FEW_NODES * node:
        return every_size(cluster)[-2::-1]
    found, power = set(), node
    while power <= whole:
        found.add(whole // power * power)
        power *= 2
    for replica in (1, 2, 4, 8, 16, 32, 64, 128):
        most = next((dp for dp in range(min(global_batch, whole // replica), 0, -1) if global_batch % dp == 0), 0)
        found.add(most * replica)
    # What is round already loses by being smaller, unless the batch is too small for it.
    least = whole / 2 if global_batch >= whole / 8 else node
    return sorted((size for size in found if least < size < whole and size % node == 0), reverse=True)


def _fits(size: int, node: int) -> bool:
    return size % node == 0 if size > node else node % size == 0
