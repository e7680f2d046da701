"""Replicas with unequal parts of a batch: still one device, to 1e-9, and the bytes that were foreseen."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from tests.matrix import crossed, rest
from tests.parallel.cases import assert_equal, small_run

COUNTS = [
    "dp=2,batch_weights=3:1",
    "dp=3,zero=1,batch_weights=2:1:1",
    "dp=2,tp=2,pp=2,zero=1,batch_weights=2:1",
    "dp=2,pp=2,batch_weights=3:1,schedule=interleaved",
    "dp=2,pp=4,batch_weights=2:1,schedule=dualpipev",
    "dp=2,pp=2,zero=1,batch_weights=1:4,schedule=zb1p",
    "dp=2,pp=2,cp=2,zero=1,batch_weights=2:1,schedule=gpipe",
    "dp=4,pp=2,zero=2,shard=2,batch_weights=2:2:1:1,schedule=zbv",
    *rest("dp=2,pp=2,zero=1,batch_weights=1:3,schedule=zbv", "dp=4,zero=1,shard=2,batch_weights=1:3:2:2"),
]
SIZES = [
    "dp=2,zero=2,batch_weights=3:1",
    "dp=2,tp=2,zero=3,batch_weights=1:2",
    "dp=2,pp=2,zero=3,batch_weights=2:1,schedule=zbv",
    "dp=2,cp=2,zero=3,batch_weights=2:1,micro_batch=2",
]
EXPERTS = [
    "dp=4,ep=2,zero=1,batch_weights=2:2:1:1",
    "dp=2,tp=2,ep=2,batch_weights=2:1",
    "dp=2,pp=2,ep=2,zero=3,batch_weights=1:2,schedule=dualpipev",
    *rest("dp=2,ep=2,batch_weights=2:1"),
]


@pytest.mark.parametrize("layout", COUNTS)
def test_more_micro_batches(pool: Pool, layout: str) -> None:
    run = small_run(layout)
    assert run.layout.has_unequal_counts
    assert_equal(pool, run)


@pytest.mark.parametrize("layout", SIZES)
def test_larger_micro_batches(pool: Pool, layout: str) -> None:
    run = small_run(layout)
    assert run.layout.has_unequal_sizes
    assert_equal(pool, run)


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, model="tiny-deepseek"))


@pytest.mark.parametrize(
    ("layout", "more"),
    crossed(
        ["dp=2,pp=2,zero=1,batch_weights=3:1", "dp=2,zero=3,batch_weights=2:1"],
        [["data.assignment=work"], ["optimizer.kind=muon"], ["model.tie_embeddings=true"]],
    ),
)
def test_whatever_else_there_is(pool: Pool, layout: str, more: list[str]) -> None:
    assert_equal(pool, small_run(layout, *more))


SHARDS = [
    "dp=2,zero=1,shard_weights=3:1",
    "dp=3,zero=2,shard_weights=1:2:1",
    "dp=2,tp=2,pp=2,zero=3,shard_weights=1:3,schedule=zbv",
    "dp=4,zero=3,shard=2,shard_weights=2:1",
    "dp=2,cp=2,zero=3,shard_weights=3:1",
    "dp=2,pp=2,zero=1,shard_weights=1:2,batch_weights=3:1,schedule=interleaved",
    "dp=2,zero=3,shard_weights=1:2,batch_weights=2:1",
]


@pytest.mark.parametrize("layout", SHARDS)
def test_unequal_shards(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout))


@pytest.mark.parametrize(
    "layout", ["dp=4,ep=2,zero=3,shard_weights=3:1:2:1", "dp=2,tp=2,ep=2,zero=1,shard_weights=3:1"]
)
def test_unequal_shards_of_experts(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, model="tiny-deepseek"))


@pytest.mark.parametrize("layout", ["dp=2,tp=2,zero=1,shard_weights=3:1", "dp=3,zero=3,shard_weights=1:2:3"])
def test_matrices_of_unequal_shards_find_home(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, "optimizer.kind=muon"))


def test_ranks_keep_what_their_weights_say(pool: Pool) -> None:
    run = small_run("dp=2,zero=3,shard_weights=3:1")
    larger, smaller = pool.run("tests.parallel.cases:held_bytes", (run,), ranks=2)
    assert larger["optimizer"] == pytest.approx(3 * smaller["optimizer"], rel=0.01)
    assert larger["master"] == pytest.approx(3 * smaller["master"], rel=0.01)


@pytest.mark.parametrize("layout", ["dp=2,pp=2,zero=1,batch_weights=3:1", "dp=2,zero=3,batch_weights=3:1"])
def test_evaluation_and_batches_that_grow(pool: Pool, layout: str) -> None:
    found = []
    for each in ("dp=1", layout):
        more = ["training.batch_ramp=8x1", "training.global_batch=16"]
        run = small_run(each, *more, micro_batches=4)
        job = "tests.parallel.cases:losses_and_evaluation"
        losses = pool.run(job, (run,), ranks=run.layout.world_size)
        assert all(other == losses[0] for other in losses)
        found.append(losses[0])
    assert found[1] == pytest.approx(found[0], rel=1e-12)
