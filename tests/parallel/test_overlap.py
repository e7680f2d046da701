"""Collectives start before the computation they are to overlap with: by the order of calls on real ranks."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from tests.matrix import rest
from tests.parallel.cases import assert_equal, small_run

ALL_REDUCE = "c10d::allreduce_"
BACKWARD = ("backward of layers.", "weight gradients of layers.")

NARROW = ["training.precision=fp8", "training.sequence=16", "model.mixture.shared_ffn=32"]
NARROW += [f"model.latent.{name}" for name in ("kv_rank=32", "qk_nope_dim=16", "qk_rope_dim=16")]


@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,zero=3,shard=2",
        "dp=4,pp=2,zero=2,shard=2,schedule=zb1p",
        *rest("dp=4,zero=1,shard=2", "dp=4,zero=2,shard=2"),
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
        ("tiny-llama", "dp=4,pp=2,zero=3,shard=2,schedule=dualpipev", ["model.tie_embeddings=true"]),
        ("tiny-deepseek", "dp=4,ep=2,zero=1,shard=2", []),
        ("tiny-mixtral", "dp=4,tp=2,ep=2,zero=3,shard=2,offload=true", []),
        *rest(
            ("tiny-llama", "dp=4,zero=1,shard=2", ["model.tie_embeddings=true"]),
            ("tiny-llama", "dp=4,pp=2,zero=2,shard=2,schedule=zbv", []),
        ),
    ],
)
def test_hybrid_sharding_is_equal_to_one_device(pool: Pool, model: str, layout: str, overrides: list[str]) -> None:
    assert_equal(pool, small_run(layout, *overrides, model=model))


@pytest.mark.parametrize(
    ("model", "layout", "overrides"),
    [
        ("tiny-llama", "tp=2", []),
        ("tiny-llama", "tp=2,sequence_parallel=false", []),
        ("tiny-deepseek", "tp=2", []),
        ("tiny-deepseek", "tp=2,sequence_parallel=false,recompute=full", ["model.latent.q_rank=0"]),
        ("tiny-deepseek", "tp=2,recompute=full", NARROW),
        *rest(("tiny-llama", "tp=2", ["training.compile=on"])),
    ],
)
def test_input_gradients_are_summed_under_the_matmul_of_weight_gradients(
    pool: Pool, model: str, layout: str, overrides: list[str]
) -> None:
    """On CPUs a rank waits where it starts: what follows the wait is what would be computed under the collective."""
    fields = ("training.precision=float32", "model.layers=2", "training.compile=off", *overrides)
    run = small_run(layout, *fields, model=model, micro_batches=1)
    kind = "reduce-scatter" if run.layout.sequence_parallel else "all-reduce"
    names = ("wait: ", "_c10d_functional::", "aten::mm", "aten::addmm", "backward of layers.", "gradients of")
    for calls in pool.run("tests.parallel.overlap_jobs:started", (run, names), ranks=2):
        first = next(place for place, name in enumerate(calls) if name.startswith("backward of layers."))
        backward = calls[first : calls.index("gradients of this step")]
        sums = [place for place, name in enumerate(backward) if name == f"wait: {kind} of tp"]
        # Of a feed-forward block, and of queries, keys and values or their latents. Queries without one have their own.
        wanted = (3 if "model.latent.q_rank=0" in overrides else 2) * run.model.layers
        assert len(sums) >= wanted, backward
        assert all(backward[place + 1].startswith("aten::mm") for place in sums[:wanted]), backward
