"""What the engine collectives is what the planner counts, to the byte, on every rank.

Layouts in float64 are held to it by every test of equality (`assert_equal`); here is the rest."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.planning.collectives import predicted_ledger, unforeseen
from cuboid.spec.model import load_model
from cuboid.spec.partition import partition
from cuboid.spec.sharding import units
from cuboid.telemetry.communication_ledger import Ledger
from tests.matrix import crossed
from tests.parallel.cases import small_run


@pytest.mark.parametrize(
    ("precision", "layout", "overrides"),
    [
        ("bf16", "dp=2,tp=2,pp=2,zero=0", ["model.tie_embeddings=true", "model.vocab=259"]),
        ("float32", "dp=4,pp=2,zero=1,shard=2", ["model.tie_embeddings=true"]),
        ("bf16", "dp=4,tp=2,zero=2,shard=2,recompute=full", ["model.vocab=131"]),
        ("float32", "dp=2,tp=4,zero=3,sequence_parallel=false,recompute=selective", ["model.kv_heads=2"]),
        ("bf16", "dp=2,pp=2,zero=3,schedule=dualpipev", ["model.tie_embeddings=true", "model.layers=5"]),
        ("bf16", "dp=4,zero=3,shard=1", []),
        ("bf16", "dp=2,tp=2,pp=2", ["training.gradient_sums=bf16", "model.tie_embeddings=true"]),
        ("bf16", "dp=4,tp=2,zero=2,shard=2", ["training.gradient_sums=bf16"]),
    ],
)
def test_other_precisions(pool: Pool, precision: str, layout: str, overrides: list[str]) -> None:
    run = small_run(layout, f"training.precision={precision}", *overrides)
    assert pool.run("tests.parallel.cases:unforeseen", (run,), ranks=run.layout.world_size) == [[]] * (
        run.layout.world_size
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-mixtral", "dp=2,tp=4,ep=8,sequence_parallel=false,zero=3"),
        ("tiny-qwen3-moe", "dp=2,pp=2,ep=2,schedule=zbv,zero=3,recompute=full"),
        ("tiny-deepseek", "tp=2,pp=2,ep=2,sequence_parallel=false,recompute=selective"),
        ("tiny-deepseek", "dp=4,ep=2,zero=1,shard=2"),
        ("tiny-deepseek", "cp=4,ep=2,cp_method=hybrid,recompute=full"),
    ],
)
def test_mixtures_and_latent_attention(pool: Pool, model: str, layout: str) -> None:
    run = small_run(layout, model=model)
    ranks = run.layout.world_size
    assert pool.run("tests.parallel.cases:unforeseen", (run,), ranks=ranks) == [[]] * ranks


def test_rows_that_find_no_room_do_not_travel(pool: Pool) -> None:
    run = small_run("dp=2,tp=2,ep=2", "model.mixture.capacity_factor=0.5", model="tiny-mixtral")
    assert pool.run("tests.parallel.cases:unforeseen", (run,), ranks=4) == [[]] * 4
    full = predicted_ledger(run, 0)
    full.add("ep", "all-to-all", 2, 1)
    assert unforeseen(run, 0, full), "more than all of them is a surprise"


def test_shared_memory_and_gloo_count_alike(pool: Pool) -> None:
    both = [pool.run("tests.parallel.collective_jobs:counted", (local,), ranks=3) for local in (True, False)]
    assert both[0] == both[1]
    rows = {row["kind"]: (row["dimension"], row["ranks"], row["calls"], row["bytes"]) for row in both[0][2]}
    assert rows == {
        "all-gather": ("tp", 3, 1, 48),
        "all-reduce": ("tp", 3, 2, 96),
        "reduce-scatter": ("tp", 3, 1, 48),
    }


MODELS = ["tiny-llama", "tiny-qwen3", "tiny-gpt2", "tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek"]


@pytest.mark.parametrize(("model", "layout"), crossed(MODELS, ["pp=2", "pp=2,schedule=zbv", "dp=1"]))
def test_the_planner_knows_every_parameter_and_its_place(pool: Pool, model: str, layout: str) -> None:
    biases = ["model.qkv_bias=true", "model.output_bias=true", "model.mlp_bias=true"]
    dense = load_model(model).mixture is None
    run = small_run(layout, "model.layers=5", *(biases if dense else ()), model=model)
    found = pool.run("tests.parallel.cases:unit_layout", (run,), ranks=run.layout.pp)
    stages = partition(run.model, run.layout.stages, run.training.sequence, run.layout.layers)
    for rank, held in enumerate(found):
        mine = run.layout.stages_of(rank)
        layers = [layer for stage in mine for layer in stages[stage]]
        planned = units(run.model, layers, 0 in mine, run.layout.stages - 1 in mine)
        assert {
            unit.name: (unit.uses, [(name, each.shape) for name, each in unit.parameters.items()]) for unit in planned
        } == held


def test_nothing_is_counted_unless_asked(pool: Pool) -> None:
    run = small_run("dp=2")
    assert pool.run("tests.parallel.cases:unledgered", (run,), ranks=2) == [True, True]


def test_one_rank_exchanges_nothing() -> None:
    assert predicted_ledger(small_run("dp=1"), 0) == Ledger()
