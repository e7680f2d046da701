"""The loss scale of fp16: halves and doubles on all ranks alike, survives a checkpoint, and an overflow is no fault."""

from __future__ import annotations

import math

import pytest
import torch

from cuboid.kernels.precision import LossScale
from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run

GOOD, LARGE = torch.tensor(1.0), torch.tensor(math.inf)
YES, NO = torch.tensor(True), torch.tensor(False)


def test_it_halves_at_an_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(8.0, 3, torch.device("cpu"))
    seen = []
    for norm in (LARGE, GOOD, GOOD, LARGE, GOOD, GOOD, GOOD, GOOD):
        scale.update(GOOD, norm, norm.isfinite())
        seen.append(scale.values())
    assert seen == [
        [4.0, 0.0, 1.0],
        [4.0, 1.0, 1.0],
        [4.0, 2.0, 1.0],
        [2.0, 0.0, 2.0],
        [2.0, 1.0, 2.0],
        [2.0, 2.0, 2.0],
        [4.0, 0.0, 2.0],
        [4.0, 1.0, 2.0],
    ]
    again = LossScale(8.0, 3, torch.device("cpu"))
    again.restore(scale.values())
    assert again.values() == scale.values()
    again.restore([])
    assert again.values() == [8.0, 0.0, 0.0]


def test_it_is_never_less_than_one_and_no_matter_of_other_bad_steps() -> None:
    scale = LossScale(1.5, 2, torch.device("cpu"))
    scale.update(GOOD, LARGE, NO)
    scale.update(GOOD, LARGE, NO)
    assert scale.values() == [1.0, 0.0, 2.0]
    scale.update(torch.tensor(math.nan), LARGE, NO)  # no factor of the gradient makes a loss finite
    scale.update(GOOD, GOOD, NO)  # a spike that was left out
    assert scale.values() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "dp=2,pp=2,zero=3,schedule=zbv", "cp=2"])
def test_fp16_stays_close_to_float32_and_ranks_agree(pool: Pool, layout: str) -> None:
    exact = small_run(layout, "training.precision=float32")
    doubling = ("training.loss_scale=1024", "training.loss_scale_steps=1")
    coarse = small_run(layout, "training.precision=fp16", *doubling)
    expected = pool.run("tests.parallel.precision_jobs:steps", (exact,), ranks=exact.layout.world_size)
    results = pool.run("tests.parallel.precision_jobs:steps", (coarse,), ranks=coarse.layout.world_size)
    assert all(result == results[0] for result in results), "every rank knows the same"
    losses, norms, scales, overflows = zip(*results[0], strict=True)
    exact_losses, exact_norms, _, _ = zip(*expected[0], strict=True)
    assert losses == pytest.approx(exact_losses, rel=2e-3)
    assert norms == pytest.approx(exact_norms, rel=1e-2)
    assert scales == (1024.0, 2048.0)
    assert overflows == (0, 0)


def test_a_factor_that_is_too_large_halves_on_all_ranks_in_steps_that_change_nothing(pool: Pool) -> None:
    run = small_run("dp=2", "training.precision=fp16", f"training.loss_scale={2.0**40}")
    for rank in pool.run("tests.parallel.precision_jobs:steps", (run,), ranks=2):
        assert [(math.isfinite(norm), scale, count) for _, norm, scale, count in rank] == [
            (False, 2.0**40, 1),
            (False, 2.0**39, 2),
        ]
        assert all(math.isfinite(loss) for loss, *_ in rank)


def test_the_auxiliary_losses_of_routers_are_scaled_too(pool: Pool) -> None:
    balanced = ("model.mixture.balance_coefficient=1.0", "model.mixture.z_coefficient=0.1", "training.steps=2")
    norms = []
    for precision in ("float32", "fp16"):
        run = small_run("ep=2,dp=2", f"training.precision={precision}", *balanced, model="tiny-mixtral")
        rank = pool.run("tests.parallel.precision_jobs:steps", (run,), ranks=2)[0]
        norms.append([norm for _, norm, _, _ in rank])
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)
