"""What a faster network, more memory, more accelerators or another kind would buy: the same question asked again of a
cluster that differs in one thing, each answered with its own best layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuboid.errors import UserError
from cuboid.planning.choose import resized_search
from cuboid.planning.islands import Ask, fastest_islands
from cuboid.planning.question import resized_cluster
from cuboid.spec.cluster import ClusterSpec, accelerator_table, load_cluster
from cuboid.spec.groups import Groups

OTHERS = ("l40s", "a100-80g", "h100-80g", "h200", "b200", "mi300x")
"""Accelerators that are compared, each with the nodes and links the catalog gives it."""
MORE = 2
"""Times as fast, as far, as many."""
MEMORY = 1.5


@dataclass(frozen=True)
class Change:
    """One thing that differs, and what comes of it."""

    what: str
    tokens_per_second: float
    """0: the model does not fit."""
    gain: float
    """Over the cluster as it is."""
    layout: str = ""


def sensitivity(ask: Ask, cluster: ClusterSpec, global_batch: int) -> list[Change]:
    """Of one group, what gains most first."""
    rates = {what: _rate(ask, other, global_batch) for what, other in _variants(cluster)}
    base, _ = rates.pop("")
    return _sorted([Change(what, rate, _gain(rate, base), layout) for what, (rate, layout) in rates.items()])


def sensitivity_of_islands(ask: Ask, groups: Groups, global_batch: int) -> list[Change]:
    """The same of several groups as islands, which synchronise alike: else faster links would also be spent on a milder
    table [islands]."""
    spec = fastest_islands(groups, ask, global_batch, {}).spec
    alike = {name: getattr(spec, name) for name in ("every", "bits", "delay", "fragments")}
    rates = {}
    for what, other in _variants_of_groups(groups):
        try:
            rates[what] = fastest_islands(other, ask, global_batch, alike).tokens_per_second
        except UserError:
            rates[what] = 0.0
    base = rates.pop("")
    return _sorted([Change(what, rate, _gain(rate, base)) for what, rate in rates.items()])


def _sorted(changes: list[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: -change.gain)


def _gain(rate: float, base: float) -> float:
    return rate / base - 1 if base else float(rate > 0)


def _rate(ask: Ask, cluster: ClusterSpec, global_batch: int) -> tuple[float, str]:
    try:
        question = ask(cluster, global_batch)
        found = resized_search(question)
    except UserError:
        return 0.0, ""
    return (global_batch * question.sequence / found[0], found[1]) if found else (0.0, "")


def _variants(cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    yield "", cluster
    for place, tier in enumerate(cluster.tiers):
        faster = replace(tier, bandwidth=MORE * tier.bandwidth)
        tiers = (*cluster.tiers[:place], faster, *cluster.tiers[place + 1 :])
        yield f"{tier.name} with {MORE} × the bandwidth", replace(cluster, tiers=tiers)
    yield f"{MEMORY:g} × the memory of an accelerator", replace(cluster, memory_gib=MEMORY * cluster.memory_gib)
    count = cluster.accelerators
    if count * MORE % cluster.accelerators_per_node == 0:
        yield f"{MORE} × as many accelerators", _larger(cluster)
    for name in OTHERS:
        if name == cluster.accelerator:
            continue
        per_node = accelerator_table(name)["accelerators_per_node"]
        if count <= per_node or count % per_node == 0:
            yield f"{name} in place of {cluster.accelerator}", load_cluster(f"{name}x{count}")


def _larger(cluster: ClusterSpec) -> ClusterSpec:
    """With as many nodes again on the slowest links; within a single node, as many accelerators in it."""
    count = MORE * cluster.accelerators
    *inner, last = cluster.tiers
    if inner:
        return replace(cluster, nodes=MORE * cluster.nodes, tiers=(*inner, replace(last, size=count)))
    per_node = accelerator_table(cluster.accelerator)["accelerators_per_node"] or count
    if count > per_node:
        return load_cluster(f"{cluster.accelerator}x{count}")
    return resized_cluster(replace(cluster, accelerators_per_node=count, tiers=(replace(last, size=count),)), count)


def _variants_of_groups(groups: Groups) -> Iterator[tuple[str, Groups]]:
    yield "", groups
    links = tuple(replace(link, bandwidth_gbit=MORE * link.bandwidth_gbit) for link in groups.links)
    wide = tuple(
        replace(group, uplink_gbit=MORE * group.uplink_gbit) if group.uplink_gbit else group for group in groups.groups
    )
    yield f"links with {MORE} × the bandwidth", replace(groups, links=links, groups=wide)
    near = tuple(replace(link, latency_ms=link.latency_ms / MORE) for link in groups.links)
    yield f"1/{MORE} of the latency", replace(groups, links=near)
    roomy = tuple(
        replace(group, cluster=replace(group.cluster, memory_gib=MEMORY * group.cluster.memory_gib))
        for group in groups.groups
    )
    yield f"{MEMORY:g} × the memory of all accelerators", replace(groups, groups=roomy)
    for place, group in enumerate(groups.groups):
        larger = replace(group, cluster=_larger(group.cluster))
        members = (*groups.groups[:place], larger, *groups.groups[place + 1 :])
        yield f"{MORE} × as many accelerators at {group.name}", replace(groups, groups=members)
