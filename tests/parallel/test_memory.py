"""What a ZeRO stage says it splits is really not held: counted on the storage each rank has allocated
between steps; and what context parallelism leaves a rank to keep within a step."""

from __future__ import annotations

import pytest

from cuboid.cost.constants import engine_named
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.memory import memory_by_rank
from cuboid.cost.sharding import rank_parameters
from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run


def held(pool: Pool, layout: str, *overrides: str) -> list[dict[str, int]]:
    run = small_run(layout, *overrides)
    return pool.run("tests.parallel.cases:held_bytes", (run,), ranks=run.layout.world_size)


def whole_bytes(*overrides: str) -> int:
    return 8 * small_run("dp=1", *overrides).model.parameters


def close(value: float, expected: float) -> bool:
    return value == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dp", [2, 4])
def test_each_stage_splits_what_it_says(pool: Pool, dp: int) -> None:
    whole = whole_bytes()
    for zero in range(4):
        for rank in held(pool, f"dp={dp},zero={zero}"):
            assert close(rank["optimizer"], 2 * whole / (dp if zero >= 1 else 1))
            assert close(rank["gradients"], whole / (dp if zero >= 2 else 1))
            assert close(rank["parameters"] + rank["master"], whole / (dp if zero >= 3 else 1))
            assert zero < 3 or rank["parameters"] == 0


@pytest.mark.parametrize(
    "layout", ["dp=2,zero=2", "dp=2,pp=2,vpp=2,zero=3,schedule=interleaved", "dp=2,pp=2,zero=2,schedule=zbv"]
)
def test_whole_gradients_of_one_segment_at_most_wait_to_be_summed(pool: Pool, layout: str) -> None:
    run = small_run(layout, "model.layers=4")
    assert set(pool.run("tests.parallel.cases:most_on_their_way", (run,), ranks=run.layout.world_size)) == {1}


def test_hybrid_sharding_splits_over_the_shard_group_only(pool: Pool) -> None:
    whole = whole_bytes()
    for rank in held(pool, "dp=4,zero=1,shard=2"):
        assert close(rank["optimizer"], 2 * whole / 2)


def test_pipeline_and_tensor_ranks_hold_their_part(pool: Pool) -> None:
    ranks = held(pool, "tp=2,pp=2,dp=2,zero=3")
    total = sum(rank["optimizer"] for rank in ranks)
    # Norms are whole on both tensor ranks, and odd vocabularies are padded: a little more than the model, never less.
    assert 2 * whole_bytes() <= total <= 2 * whole_bytes() * 1.03


@pytest.mark.parametrize(("model", "tp"), [("tiny-gpt2", 2), ("tiny-qwen3", 4), ("tiny-deepseek", 4)])
def test_what_tensor_ranks_hold_whole_is_predicted(pool: Pool, model: str, tp: int) -> None:
    run = small_run(f"tp={tp}", model=model)
    shape, jobs, one = Shape.of(run.model), Jobs.of([run.layout], global_batch=1, sequence=8), number(1)
    predicted = float(rank_parameters(shape, jobs, shape.layers, one, one).total.item())
    for rank in pool.run("tests.parallel.cases:held_bytes", (run,), ranks=tp):
        assert rank["parameters"] == pytest.approx(8 * predicted, rel=0.002)
        assert rank["gradients"] == pytest.approx(8 * predicted, rel=0.002)


def test_bf16_keeps_float32_master_weights_and_gradients(pool: Pool) -> None:
    """Of a master weight beside a bf16 one only the 16 bits more."""
    count = small_run("dp=1").model.parameters
    (rank, _) = held(pool, "dp=2,zero=0", "training.precision=bf16")
    assert close(rank["parameters"], 2 * count)
    assert close(rank["master"], 2 * count)
    assert close(rank["gradients"], 4 * count)
    (rank, _) = held(pool, "dp=2,zero=1", "training.precision=bf16")
    assert close(rank["master"], 2 * count / 2)
    (rank, _) = held(pool, "dp=2,zero=3", "training.precision=bf16")
    assert close(rank["master"], 2 * count / 2)
    assert close(rank["parameters"], 2 * count / 2)


def test_gradients_summed_in_bf16_take_half_as_much(pool: Pool) -> None:
    count = small_run("dp=1").model.parameters
    bf16 = ("training.precision=bf16", "training.gradient_sums=bf16")
    for zero, parts in ((0, 1), (1, 1), (2, 2), (3, 2)):
        for rank in held(pool, f"dp=2,zero={zero}", *bf16):
            assert close(rank["gradients"], 2 * count / parts)
            assert close(rank["optimizer"], 8 * count / (2 if zero else 1)), "moments stay in float32"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
def test_what_a_rank_keeps_of_a_micro_batch_falls_with_context_ranks_as_predicted(
    pool: Pool, method: str, recompute: str
) -> None:
    """In float32, of which the planner's bf16 is half."""
    kept, predicted = [], []
    for cp in (1, 4):
        layout = f"cp={cp},cp_method={method},recompute={recompute}"
        more = ("training.sequence=512", "training.precision=float32", "data.attention_within_documents=false")
        run = small_run(layout, *more, micro_batches=1)
        kept.append(max(pool.run("tests.parallel.cases:kept_bytes", (run,), ranks=cp)) / 2)
        jobs = Jobs.of([run.layout], global_batch=1, sequence=512)
        rank = memory_by_rank(Shape.of(run.model), jobs, engine_named("cuboid@cpu"))["first"]
        predicted.append(float((rank.activations + rank.logits).item()))
    assert kept[0] / kept[1] == pytest.approx(predicted[0] / predicted[1], rel=0.05)
    assert kept[1] == pytest.approx(predicted[1], rel=0.4)
