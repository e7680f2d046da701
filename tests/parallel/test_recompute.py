"""Some layers of a stage recomputed and the others less: equal to one device, and what is kept falls layer by layer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cuboid.cost.constants import engine_named
from cuboid.cost.inputs import Jobs, Shape
from cuboid.cost.memory import memory_by_rank
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
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
    """The collectives too are those foreseen."""
    assert_equal(pool, small_run(layout, *overrides))


def test_routed_experts(pool: Pool) -> None:
    layout = "dp=2,ep=2,recompute=full,recompute_layers=2"
    assert_equal(pool, small_run(layout, "model.layers=4", model="tiny-deepseek"))


FROM_MOST_TO_LEAST = [
    "recompute=none",
    *(f"recompute=selective,recompute_layers={count}" for count in (2, 4)),
    "recompute=selective",
    *(f"recompute=full,recompute_layers={count}" for count in range(1, 6)),
    "recompute=full",
]


def run_of(layout: str) -> Run:
    more = ("model.layers=6", "training.sequence=128", "training.precision=float32")
    return small_run(layout, *more, micro_batches=1)


def predicted(layout: str) -> float:
    """Bytes of a micro-batch in bf16 on an engine that nothing compiles."""
    run = run_of(layout)
    jobs = Jobs.of([run.layout], global_batch=1, sequence=128)
    return float(memory_by_rank(Shape.of(run.model), jobs, engine_named("cuboid@cpu"))["first"].activations.item())


def test_what_is_kept_falls_with_every_layer_as_predicted(pool: Pool) -> None:
    runs = [(run_of(layout), True) for layout in FROM_MOST_TO_LEAST]
    kept = [pool.run("tests.parallel.cases:kept_bytes", run, ranks=1)[0] for run in runs]
    fallen = [before - after for before, after in pairwise(kept)]
    assert min(fallen) > 0
    whole = fallen[3:]  # a layer of full recomputation more each time: layers are alike
    assert max(whole) == min(whole)
    expected = [before - after for before, after in pairwise(map(predicted, FROM_MOST_TO_LEAST))]
    assert min(expected) > 0
    assert sum(expected[3:]) == pytest.approx(sum(fallen[3:]) / 2, rel=0.1)
