"""Context parallelism equals one device, by every method, with everything else."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.spec.layout import CONTEXT_METHODS
from tests.matrix import rest
from tests.parallel.cases import assert_equal, small_run


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_each_method(pool: Pool, method: str) -> None:
    assert_equal(pool, small_run(f"dp=2,cp=4,cp_method={method}"))


@pytest.mark.parametrize(
    "layout",
    [
        "cp=2,tp=2,pp=2,schedule=zbv,recompute=selective,sequence_parallel=false,cp_method=ulysses",
        "cp=2,dp=2,pp=2,schedule=zb1p,zero=2,cp_method=allgather",
        "cp=4,pp=2,schedule=dualpipev,zero=3,recompute=full,cp_method=hybrid",
        "cp=2,dp=2,pp=2,schedule=interleaved,zero=1,recompute=selective,micro_batch=2",
        *rest("cp=2,tp=2,pp=2", "cp=2,dp=4,zero=3,shard=2,recompute=selective,cp_method=allgather"),
    ],
)
def test_with_everything_else(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout))


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_without_documents(pool: Pool, method: str) -> None:
    assert_equal(pool, small_run(f"cp=4,cp_method={method}", "data.attention_within_documents=false"))


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("cp=4,cp_method=ulysses", ["model.kv_heads=1"]),
        ("cp=2,tp=4,cp_method=ulysses", ["model.kv_heads=2"]),
        ("cp=4,cp_method=ulysses,recompute=selective", ["model.heads=12", "model.kv_heads=6", "model.head_dim=8"]),
        ("cp=2,tp=2,cp_method=allgather", ["model.heads=6", "model.kv_heads=3", "model.head_dim=8"]),
        ("cp=3,dp=2,zero=1", ["training.sequence=18"]),
    ],
)
def test_heads_and_lengths_that_do_not_divide(pool: Pool, layout: str, overrides: list[str]) -> None:
    assert_equal(pool, small_run(layout, *overrides))


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-qwen3"])
def test_other_families(pool: Pool, model: str) -> None:
    """Learned positions follow the split; a tied embedding has holders on other stages."""
    assert_equal(pool, small_run("cp=2,tp=2,pp=2,zero=1,recompute=full", model=model))
