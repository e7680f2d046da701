"""Prediction layers equal one device on every layout, and what ranks send is what the planner counts."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from tests.matrix import rest
from tests.parallel.cases import assert_equal, small_run

TWO, TIED = "model.prediction_layers=2", "model.tie_embeddings=true"


def predicting(layout: str, *overrides: str) -> Run:
    return small_run(layout, *overrides, model="tiny-deepseek-mtp")


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("tp=4,dp=2,ep=4,zero=2", (TWO,)),
        ("tp=2,sequence_parallel=false,recompute=selective", (TIED,)),
        ("dp=4,zero=3,shard=2", (TWO, TIED)),
        ("cp=4,cp_method=hybrid", (TWO, "training.z_loss=0.01")),
        ("cp=2,cp_method=allgather,recompute=full", ("data.attention_within_documents=false",)),
        ("pp=2,schedule=gpipe", (TWO, TIED)),
        ("pp=2,schedule=interleaved,tp=2", (TWO,)),
        ("pp=2,schedule=zb1p,dp=2,zero=3", (TIED,)),
        ("dp=2,cp=2,pp=2,ep=2,zero=2,schedule=dualpipev,recompute=selective", ()),
        *rest(("dp=2,cp=2,tp=2,pp=2,ep=4,zero=1,schedule=zbv", (TWO,)), ("pp=2,schedule=1f1b,dp=2,zero=1", ())),
    ],
)
def test_each_dimension(pool: Pool, layout: str, overrides: tuple[str, ...]) -> None:
    assert_equal(pool, predicting(layout, *overrides))


def test_models_without_experts_and_other_optimizers(pool: Pool) -> None:
    """Norms of another kind of block, a scaled embedding, a matrix more for Muon, sequences cut short."""
    gemma = ("model.prediction_layers=1", "optimizer.kind=muon")
    assert_equal(pool, small_run("dp=2,tp=2,pp=2,zero=1", *gemma, model="tiny-gemma3"))
    assert_equal(pool, small_run("cp=2,dp=2,zero=2", "model.prediction_layers=3", "training.sequence_ramp=8x1"))
