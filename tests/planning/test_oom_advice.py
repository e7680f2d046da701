"""Which change of a layout the planner advises to a rank that lacks memory."""

from __future__ import annotations

import pytest

from cuboid.planning.choose import predict
from cuboid.planning.oom_advice import Relief, relief
from cuboid.planning.question import MEMORY_FRACTION, Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, build_run

GIB = 2**30
CLUSTER = load_cluster("h200x8")


def run_of(layout: str) -> Run:
    training = {"global_batch": 64, "sequence": 8192, "precision": "bf16"}
    return build_run({"model": "llama3-8b", "layout": layout, "training": training})


def held(layout: str) -> float:
    """By what is trained: what libraries take does not change."""
    run = run_of(layout)
    question = Question(model=run.model, cluster=CLUSTER, global_batch=64, sequence=8192)
    plan = predict(question, Layout.parse(layout))
    return max(sum(row.values()) - row["buffers"] for row in plan.memory)


def advice(layout: str, limit: float, used: float = 0.0) -> Relief:
    """`limit`: of what the planner uses of an accelerator."""
    found = relief(run_of(layout), CLUSTER, 0, used, limit / MEMORY_FRACTION)
    assert found is not None
    return found


def test_the_fastest_of_the_smallest_changes() -> None:
    """Eight H200s: splitting the optimizer costs next to no time, recomputing does."""
    now, split = held("dp=8"), held("dp=8,zero=1")
    found = advice("dp=8", limit=split + GIB)
    assert found.change in ("zero=1", "zero=2", "zero=3") and found.enough
    assert found.freed == pytest.approx(now - held(f"dp=8,{found.change}"))


def test_what_the_model_does_not_foresee_is_not_freed() -> None:
    """A rank that holds 60 GiB more than predicted holds them afterwards too."""
    now, enough = held("dp=8"), held("dp=8,zero=1") + GIB
    more = advice("dp=8", limit=enough + 60 * GIB, used=now + 60 * GIB)
    assert more == advice("dp=8", limit=enough, used=now)
    assert advice("dp=8", limit=enough, used=now + 60 * GIB).change != more.change


def test_two_fields_where_one_is_not_enough() -> None:
    limit = held("dp=8,zero=3,recompute=full") + GIB
    found = advice("dp=8", limit)
    assert found.enough and held(f"{found.change}" if "dp=" in found.change else f"dp=8,{found.change}") <= limit


def test_offloading_is_advised_where_nothing_else_is_enough() -> None:
    limit = held("dp=1,recompute=full,offload=true") + GIB
    assert held("dp=1,recompute=full") > limit
    found = advice("dp=1,recompute=full", limit)
    assert found.change == "offload=true" and found.enough and found.slower > 0


def test_one_gpu_may_offload_its_optimizer() -> None:
    """Which frees what neither recomputing nor anything else of one rank can."""
    found = advice("recompute=full", limit=held("recompute=full,offload=true") + GIB)
    assert (found.change, found.enough) == ("offload=true", True)


def test_where_nothing_is_enough_the_most_is_named() -> None:
    found = advice("dp=8", limit=1 * GIB)
    assert not found.enough and found.freed > 0
    alone = run_of("recompute=full,offload=true")
    assert relief(alone, CLUSTER, 0, 0.0, 1 * GIB) is None, "one rank has nothing left to change"
