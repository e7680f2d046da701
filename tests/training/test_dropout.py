"""Dropout: on every layout what one process drops, in training alone."""

from __future__ import annotations

import pytest
import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.verification.compare import compare, observed_trace
from cuboid.verification.reference import reference_trace
from tests.parallel.cases import assert_equal, losses_and_evaluation, small_run

DROPOUT = "training.dropout=0.3"


@pytest.mark.parametrize(
    ("layout", "model", "settings"),
    [
        ("dp=2,tp=2,pp=2,zero=1,recompute=selective", "tiny-gpt2", ("training.batch_ramp=2x1",)),
        ("dp=2,tp=4,zero=3,micro_batch=2,sequence_parallel=false", "tiny-gemma3", ()),
        ("cp=2,tp=2,pp=2,ep=2,schedule=zbv,recompute=full", "tiny-deepseek", ("training.sequence_ramp=4x1",)),
    ],
)
def test_layouts(pool: Pool, layout: str, model: str, settings: tuple[str, ...]) -> None:
    assert_equal(pool, small_run(layout, DROPOUT, *settings, model=model))


@pytest.mark.parametrize("other", ["training.dropout=0.301", "training.dropout=0"])
def test_another_rate_is_no_proof(other: str) -> None:
    run = small_run("dp=1", DROPOUT)
    observed = observed_trace(small_run("dp=1", other), 0)
    assert observed is not None and not compare(run, observed, reference_trace(run)).passed


def test_evaluation_drops_nothing() -> None:
    still = ("learning_rate.peak=0", "training.precision=float32")
    with_it, without = (
        losses_and_evaluation(0, small_run("dp=1", *still, rate)) for rate in (DROPOUT, "training.dropout=0")
    )
    assert (with_it[0], with_it[-1]) == (without[0], without[-1])
    assert with_it[1] != without[1]


def test_what_a_graph_reads_anew_each_step_has_the_keys_of_its_tokens() -> None:
    """Nothing else of a micro-batch without documents may change beside the inputs of a CUDA graph."""
    run = small_run("dp=1", DROPOUT, "data.attention_within_documents=false", "data.positions_within_documents=false")
    engine, source = build_engine(run, 0, torch.device("cpu")), make_source(run)
    first, later = (engine.batches.of(micro_batches(source, run, step, 0, torch.device("cpu"))[0]) for step in range(2))
    copy = first.cloned()
    for own, new in zip(copy.inputs, later.inputs, strict=True):
        own.copy_(new)
    assert copy.positions.dropout is not None and later.positions.dropout is not None
    assert copy.positions.dropout.equal(later.positions.dropout) and copy.tokens.equal(later.tokens)
    assert first.positions.dropout is not None and not first.positions.dropout.equal(later.positions.dropout)
    assert copy.positions.index.equal(later.positions.index)
