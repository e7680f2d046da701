"""Checks of a running training: they find public bugs that are put back into the engine, and are silent where nothing
is wrong. A sample; `benchmarks/job_checks.py` tries the whole catalogue."""

from __future__ import annotations

from typing import Any

import pytest

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.checks import ChecksSpec
from cuboid.verification.make import verification_run
from tests.training.checks.jobs import checked
from tests.verification.bugs.bug import CATALOGUE

SAMPLE = [
    ("gradients-not-summed-dp", "float64", "reduction", "sum missing over dp"),
    ("norms-not-summed-sp", "bf16", "reduction", "sum missing over tp"),
    ("micro-batch-dropped", "float64", "reduction", "micro-batch 2 is missing"),
    ("norm-of-one-stage", "bf16", "norm", "only pp rank 0"),
    ("update-of-one-rank-missing", "float64", "update", "not updated"),
    ("all-ranks-see-the-same-data", "float64", "forward", "ranks see the same data"),
    ("loss-not-divided", "bf16", "input gradient", "not divided by the number of tokens"),
    ("documents-ignored-by-ring", "bf16", "forward", "documents ignored"),
    ("input-gradient-not-summed", "float64", "input gradient", ""),
    ("moments-lost", "bf16", "update", "moments were lost"),
    ("muon-scale-of-shards", "bf16", "update", "factor 0.707"),
    ("recomputation-counts-tokens-twice", "float64", "reduction", "factor 2"),
]


def warnings_of(pool: Pool, run: Any, bug: str = "") -> list[dict[str, Any]]:
    found = pool.run("tests.training.checks.jobs:warnings_of", (run, bug), ranks=run.layout.world_size)[0]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(("name", "precision", "where", "cause"), SAMPLE)
def test_a_bug_is_found_while_the_job_runs(pool: Pool, name: str, precision: str, where: str, cause: str) -> None:
    found = warnings_of(pool, checked(CATALOGUE[name].run(precision), 3), name)
    assert found, "nothing was found"
    assert found[0]["located"]["where"] == where
    assert cause in found[0]["located"]["cause"]
    assert cause in found[0]["text"], "the sentence says it too"


@pytest.mark.parametrize(
    ("layout", "model", "precision"),
    [
        ("dp=2,tp=2,zero=2", "tiny-qwen3", "bf16"),
        ("dp=2,pp=2,schedule=zb1p", "tiny-gpt2", "float64"),
        ("dp=4,ep=2,zero=1,shard=2", "tiny-qwen3-moe", "bf16"),
        ("cp=2,tp=2", "tiny-llama", "fp16"),
        ("tp=4,sequence_parallel=false", "tiny-gpt-oss", "float32"),
        ("dp=2,zero=3,recompute=full", "tiny-gpt2", "float64"),
    ],
)
def test_what_is_right_is_not_said_to_be_wrong(pool: Pool, layout: str, model: str, precision: str) -> None:
    run = checked(verification_run(layout, model, ("model.layers=2",), dtype=precision), 4, every=4)
    assert warnings_of(pool, run) == []


def test_biases_that_qk_clip_scales_are_not_said_to_be_wrong(pool: Pool) -> None:
    clipped = ("model.layers=2", "model.qkv_bias=true", "optimizer.kind=muon", "optimizer.qk_clip=0.01")
    run = checked(verification_run("dp=2", "tiny-llama", clipped, dtype="float64"), 4, every=1)
    assert warnings_of(pool, run) == []


def test_what_is_wrong_stops_the_run_if_it_is_to(pool: Pool) -> None:
    run = checked(CATALOGUE["norm-of-one-stage"].run("float64"), 3, wrong="stop")
    with pytest.raises(UserError, match=r"gradient norm.*checks\.wrong=warn"):
        warnings_of(pool, run, "norm-of-one-stage")


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"checks\.only=sum is unknown; use .*sums"):
        ChecksSpec(every=5, only="sum")
    with pytest.raises(UserError, match=r"checks\.only=sums checks no step with checks\.every=0"):
        ChecksSpec(only="sums")
    with pytest.raises(UserError, match=r"checks\.every"):
        ChecksSpec(every=-1)
    assert ChecksSpec(every=5, only="copies, sums").names == ("copies", "sums")
