"""The heart: layouts equal one device in float64, to 1e-9, in loss, gradients, norm and parameters."""

from __future__ import annotations

from itertools import product

import pytest

from cuboid.launch.pool import Pool
from tests.matrix import rest
from tests.parallel.cases import assert_equal, small_run

# Chosen so that every schedule meets every ZeRO stage, and each of both meets every tensor degree and kind of
# recomputation with --thorough; every run of the tests meets each schedule, stage, degree and kind.
CROSSED = [
    "dp=2,tp=2,pp=2,zero=0,schedule=gpipe,recompute=selective",
    "tp=4,pp=2,zero=0,schedule=1f1b,recompute=full",
    "dp=2,tp=2,pp=2,zero=1,schedule=1f1b",
    "dp=2,tp=2,pp=2,zero=3,schedule=1f1b,recompute=full",
    "dp=4,pp=2,zero=3,schedule=interleaved,vpp=3",
    "dp=2,tp=2,pp=2,zero=2,schedule=zb1p",
    "dp=2,pp=4,zero=3,schedule=zbv",
    "dp=2,tp=2,pp=2,zero=1,schedule=dualpipev,recompute=selective",
    "dp=2,tp=2,pp=2,zero=3,schedule=dualpipev",
    "dp=2,tp=4,zero=3",
]
REST = [
    "dp=2,pp=2,zero=3,schedule=gpipe,recompute=selective",
    "dp=2,pp=4,zero=2,schedule=1f1b,recompute=selective",
    "dp=2,pp=4,zero=0,schedule=interleaved",
    "dp=2,pp=4,zero=1,schedule=zb1p",
    "dp=2,tp=2,pp=2,zero=0,schedule=zbv",
    "dp=4,pp=2,zero=1,schedule=gpipe,recompute=full",
    "dp=2,pp=2,zero=2,schedule=gpipe",
    "dp=2,pp=2,zero=1,schedule=interleaved,vpp=4,recompute=selective",
    "dp=2,tp=2,pp=2,zero=2,schedule=interleaved,recompute=full",
    "tp=2,pp=4,zero=0,schedule=zb1p,recompute=selective",
    "dp=2,pp=2,zero=3,schedule=zb1p,recompute=full",
    "dp=2,pp=2,zero=1,schedule=zbv,recompute=full",
    "dp=4,pp=2,zero=2,schedule=zbv,recompute=selective",
    "dp=2,pp=4,zero=0,schedule=dualpipev,recompute=full",
    "dp=2,pp=2,zero=2,schedule=dualpipev",
]


@pytest.mark.parametrize("layout", [*CROSSED, *rest(*REST)])
def test_schedules_zero_stages_and_recompute(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, micro_batches=4))


@pytest.mark.parametrize(
    "layout", ["dp=2,tp=2,zero=1", "dp=2,pp=2,zero=3,schedule=zbv", "cp=2,dp=2,zero=2", *rest("tp=4")]
)
def test_learning_rates_that_differ_between_matrices(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, "model.initialization=mup", "model.ffn=160"))


@pytest.mark.parametrize(
    ("layout", "model"), [("dp=2,tp=2,pp=2,zero=3", "tiny-gpt2"), ("dp=2,ep=2,tp=2", "tiny-deepseek")]
)
def test_every_recipe_starts_with_the_same_bits_on_any_layout(pool: Pool, layout: str, model: str) -> None:
    run = small_run(layout, "training.precision=float32", "model.tie_embeddings=false", model=model)
    for unequal in pool.run("tests.parallel.cases:unequal_at_the_start", (run,), ranks=run.layout.world_size):
        assert unequal == []


ONE_DIMENSION = ["dp=8", "tp=8", "pp=8", "dp=1"]


@pytest.mark.parametrize("layout", ONE_DIMENSION)
def test_one_dimension(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout))


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("pp=3", ["model.layers=7"]),
        ("pp=2,schedule=interleaved,vpp=3", ["model.layers=11"]),
        ("tp=4", ["model.vocab=257"]),
        ("tp=8", ["model.vocab=9", "model.tie_embeddings=true"]),
        ("tp=8", ["model.kv_heads=2"]),
        ("tp=4,sequence_parallel=false", ["model.kv_heads=1"]),
        ("tp=4", ["model.heads=12", "model.kv_heads=6", "model.head_dim=8"]),
        ("tp=2,pp=2,sequence_parallel=false,dp=2", []),
        ("tp=4,sequence_parallel=false,recompute=selective", ["model.layers=2"]),
        ("dp=2,micro_batch=3", []),
        *rest(
            ("dp=2,pp=3,schedule=zbv,zero=1", ["model.layers=7"]),
            ("tp=4,dp=2,zero=3", ["model.vocab=262"]),
            ("tp=2,dp=2,zero=2", ["model.heads=6", "model.kv_heads=3", "model.head_dim=8"]),
            ("tp=2,pp=2,micro_batch=2,schedule=zb1p", []),
        ),
    ],
)
def test_what_does_not_divide(pool: Pool, layout: str, overrides: list[str]) -> None:
    assert_equal(pool, small_run(layout, *overrides))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"])
def test_fewer_micro_batches_than_stages(pool: Pool, thorough: bool, schedule: str) -> None:
    assert_equal(pool, small_run(f"pp=4,schedule={schedule}", micro_batches=3))
    if thorough or schedule in ("1f1b", "zbv"):
        assert_equal(pool, small_run(f"pp=4,schedule={schedule}", micro_batches=1))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-gpt2", "dp=2,tp=2,pp=2"),
        ("tiny-qwen3", "dp=2,tp=2,pp=2,zero=1,sequence_parallel=false"),
        ("tiny-qwen3", "dp=2,pp=2,zero=3,schedule=zbv"),
        ("tiny-gpt2", "dp=4,zero=3"),
        ("tiny-gpt2", "tp=2,pp=2,schedule=dualpipev,recompute=selective"),
        *rest(
            ("tiny-gpt2", "tp=4,sequence_parallel=false"),
            ("tiny-gpt2", "dp=2,pp=4,zero=2,schedule=interleaved"),
            ("tiny-qwen3", "tp=4,recompute=full"),
        ),
    ],
)
def test_tied_embeddings_and_other_families(pool: Pool, model: str, layout: str) -> None:
    assert_equal(pool, small_run(layout, model=model))


@pytest.mark.parametrize("layout", ["dp=4,zero=1,shard=2", "dp=4,pp=2,zero=3,shard=2", *rest("dp=4,zero=2,shard=2")])
def test_hybrid_sharding(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout))


def test_qwen2_biases_and_rope_scaling(pool: Pool) -> None:
    overrides = ["model.qkv_bias=true", "model.rope_scaling.factor=8.0", "model.rope_scaling.low_frequency_factor=1.0"]
    overrides += ["model.rope_scaling.high_frequency_factor=4.0", "model.rope_scaling.original_positions=64"]
    assert_equal(pool, small_run("dp=2,tp=2,pp=2,zero=1", *overrides))


@pytest.mark.thorough
def test_every_combination_that_fits(pool: Pool) -> None:
    """Schedule × ZeRO stage × tensor degree × recomputation on eight ranks."""
    schedules = ["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"]
    for schedule, zero, tp, recompute in product(schedules, range(4), (1, 2, 4), ("none", "selective", "full")):
        dp = max(1, 4 // tp) if tp < 4 else 1
        assert_equal(pool, small_run(f"dp={dp},tp={tp},pp=2,zero={zero},schedule={schedule},recompute={recompute}"))
