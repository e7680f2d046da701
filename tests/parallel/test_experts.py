"""Mixtures of experts and latent attention in every dimension at once: equal to one device, balancing included."""

from __future__ import annotations

import random

import pytest

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from tests.matrix import rest
from tests.parallel.cases import assert_equal, small_run

MODELS = ["tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek"]

# Every schedule, ZeRO stage, kind of recomputation and way of holding experts; the models take turns.
CROSSED = [
    "dp=2,ep=2,tp=2,pp=2,schedule=zbv",
    "dp=4,ep=4,cp=2,zero=3",
    "tp=4,ep=1,recompute=selective",
    "tp=4,ep=4,sequence_parallel=false",
    "dp=2,tp=2,ep=4,zero=1,recompute=full",
    "dp=4,ep=2,pp=2,zero=2,schedule=1f1b,recompute=selective",
    "dp=2,ep=2,pp=4,zero=3,schedule=interleaved",
    "dp=2,ep=2,pp=2,zero=2,schedule=zb1p,recompute=full",
    "cp=2,tp=2,ep=4,pp=2,schedule=dualpipev,zero=3",
    "dp=2,cp=2,tp=2,ep=8,cp_method=ulysses,zero=1",
    "dp=4,ep=2,zero=3,shard=2",
    "dp=4,ep=4,zero=2,shard=2,schedule=gpipe",
    "dp=2,ep=2,micro_batch=2,tp=2,sequence_parallel=false",
]

RARE = {
    "dp=2,ep=2,tp=2,pp=2,schedule=zbv",
    "dp=4,ep=2,pp=2,zero=2,schedule=1f1b,recompute=selective",
    "dp=2,cp=2,tp=2,ep=8,cp_method=ulysses,zero=1",
    "dp=4,ep=4,zero=2,shard=2,schedule=gpipe",
}
"""Of which all parts are met in others; tried with --thorough."""


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        pytest.param(layout, number, marks=[pytest.mark.thorough] if layout in RARE else [])
        for number, layout in enumerate(CROSSED)
    ],
)
def test_layouts_equal_one_device(pool: Pool, layout: str, number: int) -> None:
    layers = 8 if "interleaved" in layout else 4 if "pp" in layout else 3
    batches = 3 if "pp" in layout else 2
    assert_equal(pool, small_run(layout, f"model.layers={layers}", model=MODELS[number % 3], micro_batches=batches))


@pytest.mark.parametrize(
    ("layout", "model", "overrides"),
    [
        ("dp=2,cp=2,tp=2,ep=4", "tiny-mixtral", ["model.mixture.capacity_factor=0.75"]),
        ("dp=2,ep=2,pp=2,recompute=full,micro_batch=2", "tiny-deepseek", ["model.mixture.capacity_factor=1.0"]),
        ("tp=4,pp=2,ep=2", "tiny-deepseek", ["model.latent.q_rank=0", "model.latent.v_dim=12"]),
        ("dp=2,tp=2,ep=4,pp=2", "tiny-qwen3-moe", ["model.tie_embeddings=true", "model.mixture.normalized=false"]),
        ("dp=2,ep=2,pp=2,schedule=zb1p", "tiny-mixtral", ["model.mixture.experts=6", "model.activation=gelu"]),
        ("dp=8,ep=8", "tiny-mixtral", ["model.mixture.top_k=1", "training.sequence=2"]),
        ("dp=2,ep=2,tp=2,zero=2", "tiny-deepseek", ["model.initialization=mup"]),
    ],
)
def test_what_is_rarer(pool: Pool, layout: str, model: str, overrides: list[str]) -> None:
    assert_equal(pool, small_run(layout, "model.layers=4", *overrides, model=model))


def test_ranks_hold_their_share_of_the_experts(pool: Pool) -> None:
    run = small_run("dp=4,ep=4", model="tiny-mixtral")
    whole = small_run("dp=4", model="tiny-mixtral")
    assert run.model.mixture is not None
    experts = 8 * run.model.layers * 3 * run.model.hidden * run.model.mixture.expert_ffn
    held, all_of_them = (
        pool.run("tests.parallel.cases:held_bytes", (each,), ranks=4)[0]["parameters"] for each in (run, whole)
    )
    assert all_of_them - held == experts * 3 // 4 * 8


@pytest.mark.parametrize("model", ["tiny-deepseek", *rest("tiny-qwen3-moe")])
def test_a_chain_of_layouts_keeps_what_balances_experts(pool: Pool, tmp_path: object, model: str) -> None:
    layouts = ["dp=2,ep=2,tp=2", "dp=4,ep=4,zero=3", "pp=2,schedule=zbv"]
    runs = [
        small_run(
            layout,
            "training.global_batch=8",
            "training.steps=3",
            "model.layers=4",
            "model.mixture.balance_coefficient=1.0",
            model=model,
        )
        for layout in layouts
    ]
    losses = [
        pool.run(
            "cuboid.verification.resume:train_leg", (run, str(tmp_path), step, step + 1), ranks=run.layout.world_size
        )[0]
        for step, run in enumerate(runs)
    ]
    verdict = pool.run("cuboid.verification.resume:judge_chain", (runs, str(tmp_path), losses), ranks=1)[0]
    assert verdict["passed"], verdict


def draw(random_source: random.Random, most: int) -> Run:
    """A run in five dimensions; draws again when the rules refuse one."""
    while True:
        pick = random_source.choice
        dp, cp, tp, pp = (pick([1, 2, 2, 4]) for _ in range(4))
        if not 4 <= dp * cp * tp * pp <= most:
            continue
        parts = [f"dp={dp},cp={cp},tp={tp},pp={pp},ep={pick([2, 4, 8])},zero={pick(range(4))}"]
        parts += [f"schedule={pick(['gpipe', '1f1b', 'interleaved', 'zb1p', 'zbv', 'dualpipev'])}"]
        parts += [f"recompute={pick(['none', 'selective', 'full'])},micro_batch={pick([1, 2])}"]
        parts += [f"sequence_parallel={pick(['true', 'false'])},cp_method={pick(['ring', 'ulysses', 'allgather'])}"]
        overrides = [f"model.layers={pick([4, 4, 8])}", f"training.seed={pick(range(1000))}"]
        overrides += [f"model.mixture.capacity_factor={pick([0.0, 0.0, 1.0])}"]
        try:
            return small_run(",".join(parts), *overrides, model=pick(MODELS), micro_batches=pick([1, 2, 3]))
        except UserError:
            continue


def test_random_layouts_in_five_dimensions(pool: Pool, thorough: bool) -> None:
    random_source = random.Random(20261115)
    for _ in range(60 if thorough else 2):
        assert_equal(pool, draw(random_source, 16 if thorough else 8))
