"""What a step does beside equality: precision, broken numbers, timing."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from tests.matrix import rest
from tests.parallel.cases import small_run, with_output


@pytest.mark.parametrize(
    "layout", ["dp=2,pp=2,zero=3,schedule=zbv", "tp=4,sequence_parallel=false", *rest("dp=2,tp=2,pp=2")]
)
def test_bf16_stays_close_to_float32(pool: Pool, layout: str) -> None:
    exact = small_run(layout, "training.precision=float32", "training.steps=4")
    coarse = small_run(layout, "training.precision=bf16", "training.steps=4")
    expected = pool.run("tests.parallel.cases:losses", (exact,), ranks=exact.layout.world_size)
    results = pool.run("tests.parallel.cases:losses", (coarse,), ranks=coarse.layout.world_size)
    assert results[0] == pytest.approx(expected[0], rel=1e-2)
    assert results[0] != expected[0]
    assert all(result == results[0] for result in results), "every rank knows the same loss"


@pytest.mark.parametrize(
    "layout", ["dp=2,tp=2,pp=2", "dp=4,zero=1,shard=2", *rest("dp=1", "dp=2,pp=2,zero=3,schedule=zbv")]
)
def test_gradients_summed_in_bf16_stay_close_to_those_in_float32(pool: Pool, layout: str) -> None:
    exact = small_run(layout, "training.precision=bf16", "training.steps=4")
    coarse = small_run(layout, "training.precision=bf16", "training.gradient_sums=bf16", "training.steps=4")
    expected = pool.run("tests.parallel.cases:losses", (exact,), ranks=exact.layout.world_size)
    results = pool.run("tests.parallel.cases:losses", (coarse,), ranks=coarse.layout.world_size)
    assert results[0] == pytest.approx(expected[0], rel=2e-3)
    assert results[0] != expected[0], "several micro-batches are added"
    assert all(result == results[0] for result in results), "every rank knows the same loss"


@pytest.mark.parametrize("layout", ["dp=2,tp=2", "dp=2,pp=2,zero=2"])
def test_a_step_that_is_not_finite_is_left_out_on_every_rank(pool: Pool, layout: str) -> None:
    run = small_run(layout)
    for finite, unchanged in pool.run("tests.parallel.cases:poisoned_step", (run,), ranks=run.layout.world_size):
        assert not finite
        assert unchanged


def test_equal_runs_give_equal_bits(pool: Pool) -> None:
    run = small_run("dp=2,tp=2,pp=2,zero=1", "training.precision=float32", "training.deterministic=true")
    first = pool.run("tests.parallel.cases:losses", (run,), ranks=8)
    assert pool.run("tests.parallel.cases:losses", (run,), ranks=8) == first


def test_timing_has_every_action_of_the_schedule_in_order(pool: Pool) -> None:
    from cuboid.schedule.schedules import make_schedule

    run = with_output(small_run("pp=2,schedule=zbv", micro_batches=3), keep_timing=True)
    schedule = make_schedule("zbv", 2, 3, 2)
    for rank, actions in enumerate(pool.run("tests.parallel.cases:timed_actions", (run,), ranks=2)):
        assert actions == [str(action) for action in schedule.actions[rank]]
