"""Islands, each on a layout of its own, equal their simulation in one process; every byte between them is planned."""

from __future__ import annotations

import pytest

from cuboid.launch.islands import prove
from cuboid.launch.pool import Pool
from cuboid.verification.make import islands_runs

MIXED = "tp=2; pp=2; dp=2,zero=3"
SMALL = ("training.global_batch=4", "training.sequence=8")


def assert_islands(pool: Pool, islands: str, *settings: str, model: str = "tiny-llama", layers: int = 3) -> None:
    changes = (*SMALL, f"model.layers={layers}", *settings)
    verdict = prove(islands_runs(islands, model, changes, None, "float64", 0), pool)
    assert verdict["passed"], verdict


@pytest.mark.parametrize(
    ("islands", "settings"),
    [
        (MIXED, ["every=2"]),
        (MIXED, ["every=3", "fragments=3", "delay=1", "bits=4"]),
        ("tp=2; dp=2,zero=3", ["every=4", "ramp_steps=4", "ramp_rate=1.5", "fragments=2", "delay=2", "bits=8"]),
        ("dp=2,zero=1; dp=2,tp=2,zero=2", ["every=3", "fragments=2", "bits=8", "delay=2", "mix=0.3"]),
        ("tp=2; dp=2,zero=3", ["batch_weights=2:1", "every=3", "fragments=2", "bits=4", "delay=1"]),
        ("cp=2; tp=2,pp=2,schedule=zb1p", ["every=2", "fragments=5", "bits=16", "rate=1", "momentum=0"]),
    ],
)
def test_layouts_and_bits(pool: Pool, islands: str, settings: list[str]) -> None:
    assert_islands(pool, islands, *(f"islands.{each}" for each in settings))


def test_experts_and_tied_embeddings(pool: Pool) -> None:
    assert_islands(pool, "dp=2,ep=2,zero=1; dp=1", "islands.bits=8", model="tiny-mixtral", layers=2)
    assert_islands(pool, "pp=2; tp=2,dp=2", "islands.fragments=2", "islands.bits=4", model="tiny-gpt2", layers=2)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,tp=2,zero=2"])
def test_one_island_with_plain_averaging_equals_the_plain_run(pool: Pool, layout: str) -> None:
    settings = (*SMALL, "model.layers=2", "islands.every=1", "islands.rate=1", "islands.momentum=0")
    runs = islands_runs(layout, "tiny-llama", settings, 3, "float64", 0)
    verdict = prove(runs, pool)
    assert verdict["passed"], verdict
    assert pool.run("tests.islands.jobs:far_from_plain", (runs[0],), ranks=1)[0] < 1e-9
