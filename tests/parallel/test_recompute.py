"""Some layers of a stage recomputed and the others less: equal to one device, and what is kept falls layer by layer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cuboid.launch.pool import Pool
from tests.parallel.cases import assert_equal, small_run


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        # Stages of three and two layers: one layer of each, and all of the shorter one.
        ("pp=2,recompute=full,recompute_layers=1", ["model.layers=5"]),
        ("tp=2,pp=2,recompute=selective,recompute_layers=2", ["model.layers=5"]),
        ("dp=2,pp=2,zero=3,schedule=interleaved,recompute=full,recompute_layers=1", ["model.layers=7"]),
        ("cp=2,tp=2,recompute=full,recompute_layers=2", ["model.layers=3"]),
    ],
)
def test_equals_one_device(pool: Pool, layout: str, overrides: list[str]) -> None:
    """The exchanges too are those foreseen."""
    assert_equal(pool, small_run(layout, *overrides))


def test_routed_experts(pool: Pool) -> None:
    layout = "dp=2,ep=2,recompute=full,recompute_layers=2"
    assert_equal(pool, small_run(layout, "model.layers=4", model="tiny-deepseek"))


def kept(pool: Pool, layout: str) -> int:
    """Bytes that one micro-batch keeps of all layers between its passes."""
    more = ("model.layers=6", "training.sequence=128", "training.precision=float32")
    run = small_run(layout, *more, micro_batches=1)
    found = pool.run("tests.parallel.cases:kept_bytes", (run,), ranks=1)[0]
    assert isinstance(found, int)
    return found


def test_what_is_kept_falls_with_every_layer(pool: Pool) -> None:
    selective = kept(pool, "recompute=selective")
    numbers = [kept(pool, f"recompute=full,recompute_layers={count}") for count in range(1, 6)]
    full = kept(pool, "recompute=full")
    fallen = [before - after for before, after in pairwise([selective, *numbers, full])]
    assert min(fallen) > 0
    # Layers are alike; what two of them share at their border is counted once.
    assert max(fallen) < 1.2 * min(fallen)
