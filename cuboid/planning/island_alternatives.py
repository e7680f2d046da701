"""What the groups of a cluster file could do instead of islands: the fastest group alone, or one job over all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from cuboid.errors import UserError
from cuboid.planning.choose import fastest, large_enough, resized_search
from cuboid.planning.heterogeneous_search import heterogeneous_job
from cuboid.spec.cluster import ClusterSpec, LinkTier
from cuboid.spec.groups import Group, Groups
from cuboid.spec.plugin import PythonModelSpec

if TYPE_CHECKING:
    from cuboid.planning.islands import Ask


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A way to train without islands."""

    name: str
    layout: str
    step_seconds: float
    tokens_per_second: float


def fastest_alone(groups: Groups, ask: Ask, global_batch: int) -> Group:
    """The group that trains fastest without the others."""
    known: dict[ClusterSpec, float] = {}
    least = float("inf")
    # The likely fastest first: what cannot be faster is not searched.
    for cluster in sorted((group.cluster for group in groups.groups), key=_peak, reverse=True):
        like = replace(cluster, name="")
        if like in known:
            continue
        try:
            question = ask(cluster, global_batch)
            soon = large_enough(question, [cluster.accelerators], least)
            found = resized_search(question) if soon else None
        except UserError:
            found = None
        known[like] = found[0] if found else float("inf")
        least = min(least, known[like])
    return min(groups.groups, key=lambda group: known[replace(group.cluster, name="")])


def _peak(cluster: ClusterSpec) -> float:
    return cluster.accelerators * max(cluster.peak_tflops.values(), default=0.0)


def unequal_job(groups: Groups, ask: Ask, global_batch: int) -> Alternative | None:
    if len({group.cluster.accelerator for group in groups.groups}) == 1:
        return None
    try:
        questions = [ask(group.cluster, global_batch) for group in groups.groups]
    except UserError:
        return None
    if any(isinstance(question.model, PythonModelSpec) for question in questions):
        return None
    found = heterogeneous_job(groups, questions, global_batch)
    if found is None:
        return None
    return Alternative(
        name="one job of unequal parts",
        layout=str(found.layout),
        step_seconds=found.step_seconds,
        tokens_per_second=found.tokens_per_second,
    )


def without_islands(name: str, ask: Ask, cluster: ClusterSpec, global_batch: int) -> Alternative | UserError:
    try:
        question = ask(cluster, global_batch)
        plan = fastest(question)  # simulated: closed forms know little of messages between stages on slow links
    except UserError as reason:
        return reason
    rate = global_batch * question.sequence / plan.seconds
    return Alternative(name=name, layout=str(plan.layout), step_seconds=plan.seconds, tokens_per_second=rate)


def as_one_job(groups: Groups) -> ClusterSpec:
    """All groups as one cluster of equal accelerators: each as slow, and with as little memory, as the worst of any
    group. Beyond the size of the smallest group there is one tier: the slowest link, shared by its accelerators."""
    clusters = [group.cluster for group in groups.groups]
    kinds = set.intersection(*(set(cluster.peak_tflops) for cluster in clusters))
    slowest = min(clusters, key=lambda cluster: min(cluster.peak_tflops.get(kind, 0.0) for kind in kinds or {"bf16"}))
    smallest = min(cluster.accelerators for cluster in clusters)
    total = groups.accelerators
    rate = min(link.rate for link in groups.links)
    uplinks = [found for group in groups.groups if (found := groups.uplink(group)) is not None]
    latency = max(link.latency for link in groups.links)
    inner = {min(tier.size, smallest): tier for tier in reversed(slowest.tiers)}
    tiers = [replace(inner[size], size=size) for size in sorted(inner)]
    wide = LinkTier(name="sites", size=total, bandwidth=min([rate, *uplinks]) / smallest / 1e9, latency=latency * 1e6)
    per_node = gcd(*(cluster.accelerators_per_node for cluster in clusters))
    return replace(
        slowest,
        name=groups.name,
        nodes=total // per_node,
        accelerators_per_node=per_node,
        tiers=(*tiers, wide),
        peak_tflops={kind: min(cluster.peak_tflops[kind] for cluster in clusters) for kind in kinds},
        memory_gib=min(cluster.memory_gib for cluster in clusters),
        memory_bandwidth=min(cluster.memory_bandwidth for cluster in clusters),
        host_memory_gib=min(cluster.host_memory_gib for cluster in clusters),
        measured={},
    )
