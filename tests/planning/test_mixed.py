"""One job over different accelerators: parts of the batch by speed, against equal parts and each kind by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuboid.planning.choose import predict
from cuboid.planning.mixed_search import mixed_job
from cuboid.planning.question import Question
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.fitting import check
from cuboid.spec.groups import Group, Groups, SiteLink
from cuboid.spec.model import load_model

MODEL = load_model("llama3.2-1b")


def ask(cluster: ClusterSpec, global_batch: int, **fixed: object) -> Question:
    return Question(model=MODEL, cluster=cluster, global_batch=global_batch, sequence=4096, fixed=fixed)


def lab(*kinds: str, gbit: float = 3200) -> Groups:
    members = tuple(Group(name=kind, site="lab", cluster=replace(load_cluster(kind), name=kind)) for kind in kinds)
    return Groups(
        name="lab",
        groups=members,
        links=(SiteLink(between=("lab", "lab"), bandwidth_gbit=gbit, latency_ms=0.02),),
    )


def questions(groups: Groups, global_batch: int, **fixed: object) -> list[Question]:
    return [ask(group.cluster, global_batch, **fixed) for group in groups.groups]


def test_faster_replicas_take_more() -> None:
    groups = lab("h100x16", "a100x32")
    found = mixed_job(groups, questions(groups, 576), 576)
    assert found is not None
    layout = found.layout
    assert layout.world_size == 48
    check(layout, MODEL, global_batch=576, sequence=4096, world_size=48)
    first, last = layout.batch_weights[0], layout.batch_weights[-1]
    assert first > last
    assert set(layout.batch_weights[: 16 // layout.tp]) == {first}
    # Each kind's own prediction for its part, and what crosses the link beside it.
    crossing = 6 * MODEL.parameters / (3200e9 / 8)
    alone = [
        predict(ask(load_cluster(kind), replicas * weight * 576 // layout.batch_parts), part).seconds
        for kind, replicas, weight in (("h100x16", 16 // layout.tp, first), ("a100x32", 32 // layout.tp, last))
        for part in [layout.changed(dp=replicas, batch_weights=())]
    ]
    assert found.step_seconds == pytest.approx(max(alone) + crossing, rel=0.03)
    assert found.waiting == pytest.approx(1 - min(alone) / max(alone), abs=0.03)


def test_equal_kinds_take_equal_parts() -> None:
    groups = lab("h100x8", "h100x16")
    found = mixed_job(groups, questions(groups, 96), 96)
    assert found is not None
    assert found.layout.batch_weights == ()
    assert found.waiting < 0.05


def test_a_slow_link_costs_time_and_what_is_decided_stays() -> None:
    fast, slow = (
        mixed_job(lab("h100x8", "a100x8", gbit=gbit), questions(lab("h100x8", "a100x8"), 144), 144)
        for gbit in (3200, 10)
    )
    assert fast is not None and slow is not None
    assert slow.step_seconds > fast.step_seconds + 5
    groups = lab("h100x8", "a100x8")
    decided = mixed_job(groups, questions(groups, 144, tp=2, recompute="full"), 144)
    assert decided is not None
    assert (decided.layout.tp, decided.layout.recompute) == (2, "full")
    assert mixed_job(groups, questions(groups, 144, zero=3), 144) is None


def test_what_fits_no_kind_is_none() -> None:
    groups = lab("h100x8", "a100x8")
    small = replace(
        groups,
        groups=(replace(groups.groups[0], cluster=replace(groups.groups[0].cluster, memory_gib=1.0)), groups.groups[1]),
    )
    assert mixed_job(small, questions(small, 144), 144) is None
