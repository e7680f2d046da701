"""What other hardware would buy: each row against a plan of that hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuboid.planning.choose import resized_search
from cuboid.planning.question import Question
from cuboid.planning.sensitivity import sensitivity, sensitivity_of_islands
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.groups import Group, Groups, SiteLink
from cuboid.spec.model import load_model


def ask(cluster: ClusterSpec, global_batch: int) -> Question:
    model = load_model("qwen2.5-0.5b")
    return Question(model=model, cluster=cluster, global_batch=global_batch, sequence=1024)


@pytest.mark.parametrize("name", ["a100x1", "a100x4", "a100x8", "a100x16"])
def test_each_row_is_a_plan_of_that_cluster(name: str) -> None:
    cluster = load_cluster(name)
    found = {change.what: change for change in sensitivity(ask, cluster, 64)}
    base = resized_search(ask(cluster, 64))
    other = resized_search(ask(load_cluster(f"h200x{cluster.accelerators}"), 64))
    assert base is not None and other is not None
    row = found["h200 in place of a100-80g"]
    assert row.gain == pytest.approx(base[0] / other[0] - 1)
    assert row.layout == other[1]
    twice = resized_search(ask(load_cluster(f"a100x{2 * cluster.accelerators}"), 64))
    assert twice is not None
    assert found["2 × as many accelerators"].gain == pytest.approx(base[0] / twice[0] - 1)
    for what, change in found.items():
        assert change.gain >= -1e-9 or "in place" in what


def test_more_memory_makes_room() -> None:
    small = replace(load_cluster("a100x1"), memory_gib=6.0)
    found = {change.what: change for change in sensitivity(ask, small, 8)}
    assert found["1.5 × the memory of an accelerator"].tokens_per_second > 0


def test_islands_share_the_batch_by_speed_so_that_more_of_either_helps() -> None:
    members = tuple(
        Group(name=name, cluster=replace(load_cluster(kind), name=name))
        for name, kind in (("fast", "h100x8"), ("slow", "a100x8"))
    )
    link = SiteLink(between=("fast", "slow"), bandwidth_gbit=1, latency_ms=20)
    groups = Groups(name="both", groups=members, links=(link,))
    found = {change.what: change.gain for change in sensitivity_of_islands(ask, groups, 128)}
    assert found["2 × as many accelerators at fast"] > found["2 × as many accelerators at slow"] > 0.1
    assert all(gain > -1e-3 for gain in found.values())
