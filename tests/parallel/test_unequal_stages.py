"""Stages whose layers are given by hand: still one device, to 1e-9, and the bytes that were foreseen."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from tests.parallel.cases import assert_equal, small_run

SCHEDULES = [
    "pp=3,layers=6:2:1,schedule=gpipe",
    "pp=4,layers=1:1:6:1",
    "dp=2,pp=2,layers=1:2:5:1,schedule=interleaved",
    "dp=2,tp=2,pp=2,layers=7:2,schedule=zb1p",
    "pp=2,layers=1:4:1:3,schedule=zbv",
    "dp=2,pp=2,zero=1,layers=3:1:4:1,schedule=dualpipev",
]
MIXES = [
    "dp=2,pp=2,zero=2,layers=3:6,shard_weights=1:2",
    "dp=2,tp=2,pp=2,zero=3,layers=5:1:1:2,batch_weights=2:1,shard_weights=3:1,schedule=zbv",
    "cp=2,pp=2,zero=3,layers=2:7,recompute=full,recompute_layers=3",
    "dp=2,pp=2,zero=1,layers=7:2,batch_weights=3:1,schedule=zb1p",
]
EXPERTS = [
    "dp=2,pp=2,ep=2,zero=1,layers=5:2,batch_weights=2:1",
    "dp=2,tp=2,pp=2,ep=2,layers=1:3:2:1,schedule=dualpipev",
]


@pytest.mark.parametrize("layout", SCHEDULES + MIXES)
def test_as_one_device(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, "model.layers=9"))


@pytest.mark.parametrize("layout", EXPERTS)
def test_with_experts(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, "model.layers=7", model="tiny-deepseek"))


@pytest.mark.parametrize("more", [["optimizer.kind=muon"], ["model.tie_embeddings=true"]])
def test_whatever_else_there_is(pool: Pool, more: list[str]) -> None:
    assert_equal(pool, small_run("dp=2,pp=2,zero=1,layers=3:1", *more, "model.layers=4"))


def test_prediction_layers_are_behind_the_last(pool: Pool) -> None:
    run = small_run("pp=2,layers=3:1", model="tiny-deepseek-mtp")
    assert run.model.layers == 4 and run.model.prediction_layers
    assert_equal(pool, run)
