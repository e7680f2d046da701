"""Collectives start before the computation they are to overlap with: by the order of calls on real ranks."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from tests.parallel.cases import assert_equal, small_run

ALL_REDUCE = "c10d::allreduce_"
BACKWARD = ("backward of layers.", "weight gradients of layers.")


@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,zero=1,shard=2",
        "dp=4,zero=2,shard=2",
        "dp=4,zero=3,shard=2",
        "dp=4,pp=2,zero=2,shard=2,schedule=zb1p",
    ],
)
def test_replicas_sum_their_shards_under_the_backward_pass(pool: Pool, layout: str) -> None:
    run = small_run(layout, "model.layers=6")
    ranks = run.layout.world_size
    for calls in pool.run("tests.parallel.overlap_jobs:started", (run, (ALL_REDUCE, *BACKWARD)), ranks=ranks):
        last = max(place for place, name in enumerate(calls) if name.startswith(BACKWARD))
        assert ALL_REDUCE in calls[:last], calls


@pytest.mark.parametrize(
    ("model", "layout", "overrides"),
    [
        ("tiny-llama", "dp=4,zero=1,shard=2", ["model.tie_embeddings=true"]),
        ("tiny-llama", "dp=4,pp=2,zero=2,shard=2,schedule=zbv", []),
        ("tiny-llama", "dp=4,pp=2,zero=3,shard=2,schedule=dualpipev", ["model.tie_embeddings=true"]),
        ("tiny-deepseek", "dp=4,ep=2,zero=1,shard=2", []),
        ("tiny-mixtral", "dp=4,tp=2,ep=2,zero=3,shard=2,offload=true", []),
    ],
)
def test_hybrid_sharding_is_equal_to_one_device(pool: Pool, model: str, layout: str, overrides: list[str]) -> None:
    assert_equal(pool, small_run(layout, *overrides, model=model))
