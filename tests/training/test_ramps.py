"""Batches and sequences that grow: on every layout what one process computes, and resumed at any point."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.model.initialize import initialize
from cuboid.model.rope import PositionTable
from cuboid.model.transformer import Transformer
from cuboid.report.source import open_source
from cuboid.report.summary import measured
from cuboid.spec.ramp import Ramp, parse_ramp
from cuboid.spec.run import dump_run
from cuboid.telemetry.rows import metric_rows
from cuboid.training.run_folder import check_same_training
from cuboid.verification.compare import compare, observed_trace
from cuboid.verification.make import verification_run
from cuboid.verification.reference import reference_trace
from cuboid.verification.resume import judge_chain
from tests.matrix import rest
from tests.parallel.cases import assert_equal, small_run
from tests.training.cases import short_run

STAGES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), max_size=4)


@given(STAGES, st.integers(50, 90), st.integers(0, 60))
def test_sums_are_those_of_the_batches_before(stages: list[tuple[int, int]], last: int, batch: int) -> None:
    ramp = Ramp(tuple(stages), last)
    assert ramp.sum_before(batch) == sum(map(ramp.at, range(batch)))
    assert parse_ramp("batch_ramp", ",".join(f"{number}x{many}" for number, many in stages), last) == ramp


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("training.batch_ramp=8", "is no list of size x steps; use batch_ramp=8x100,16x50"),
        ("training.batch_ramp=0x4", "is no list"),
        ("training.batch_ramp=8x4,", "is no list"),
        ("training.batch_ramp=8x99999999999", "is no list"),
        ("training.batch_ramp=16x4", "grows to 8 and has 16 before; use at most 8"),
        ("training.batch_ramp=3x4", "a batch of 3, which does not divide by dp=2 × micro_batch=1; use multiples of 2"),
        ("training.sequence_ramp=32x2", "grows to 16 and has 32 before"),
    ],
)
def test_what_is_no_ramp_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        short_run("dp=2", "nowhere", setting)


@pytest.mark.parametrize(
    ("layout", "model", "micro_batches"),
    [
        ("dp=1", "tiny-llama", 4),
        ("dp=2,tp=2,pp=2,zero=1", "tiny-llama", 4),
        ("dp=2,pp=2,zero=3,schedule=interleaved,vpp=2", "tiny-llama", 4),
        ("tp=2,pp=2,schedule=dualpipev", "tiny-llama", 8),
        ("cp=2,tp=2,pp=2,cp_method=allgather", "tiny-gpt2", 4),
        ("dp=4,zero=3,shard=2", "tiny-llama", 4),
        ("dp=2,ep=2,pp=2,schedule=zbv", "tiny-deepseek", 4),
        *rest(
            ("dp=2,pp=2,zero=2,schedule=zbv", "tiny-llama", 4),
            ("pp=4,schedule=zb1p", "tiny-llama", 4),
            ("dp=2,cp=2,zero=2", "tiny-llama", 4),
            ("dp=2,tp=2,ep=4,zero=1", "tiny-mixtral", 4),
            ("dp=2,ep=2,zero=1", "tiny-qwen3-moe", 4),
        ),
    ],
)
def test_growing_batches_and_sequences(pool: Pool, layout: str, model: str, micro_batches: int) -> None:
    """A step with a quarter of the batch in short sequences, then one with three quarters."""
    plain = small_run(layout, model=model, micro_batches=micro_batches)
    quarter = plain.training.global_batch // 4
    ramps = (f"training.batch_ramp={quarter}x1,{3 * quarter}x1", "training.sequence_ramp=4x1,5x1")
    assert_equal(pool, small_run(layout, *ramps, model=model, micro_batches=micro_batches))


@pytest.mark.parametrize("within", ["true", "false"])
def test_growing_sequences_beside_documents(pool: Pool, within: str) -> None:
    other = "false" if within == "true" else "true"
    settings = (f"data.attention_within_documents={within}", f"data.positions_within_documents={other}")
    for layout in ("dp=2,cp=2,zero=1", "tp=2,pp=2"):
        assert_equal(pool, small_run(layout, *settings, "training.sequence_ramp=4x1"))


def test_another_ramp_is_no_proof() -> None:
    run = small_run("dp=1", "training.batch_ramp=1x1")
    for other in ("training.batch_ramp=1x2", "training.sequence_ramp=4x1"):
        observed = observed_trace(
            small_run("dp=1", *(("training.batch_ramp=1x1",) if "seq" in other else ()), other), 0
        )
        assert observed is not None and not compare(run, observed, reference_trace(run)).passed


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_a_cut_sequence_is_two_shorter_ones(model: str) -> None:
    run = small_run("dp=1", model=model)
    whole = Transformer(run.model).double()
    initialize(run.model, whole, 1)
    tokens = torch.randint(run.model.vocab, (1, 8))
    labels = torch.randint(run.model.vocab, (1, 8))
    table, data = PositionTable(run.model, 8, torch.float64, torch.device("cpu")), run.data
    cut = whole.loss(tokens, labels, table.of(torch.arange(8), torch.zeros(1, 8, dtype=torch.int64), data, 3))
    parts = [
        whole.loss(tokens[:, start:stop], labels[:, start:stop], table.at(torch.arange(stop - start).unsqueeze(0)))
        for start, stop in ((0, 3), (3, 6), (6, 8))
    ]
    assert cut.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-12)
    uncut = whole.loss(tokens, labels, table.at(torch.arange(8).unsqueeze(0)))
    assert cut.item() != pytest.approx(uncut.item(), rel=1e-6)


def test_a_chain_of_layouts_in_the_middle_of_a_ramp(pool: Pool, tmp_path: Path) -> None:
    chain = ["dp=2,tp=2,zero=3", "tp=2,pp=2", "dp=4,zero=1", "cp=2,dp=2,zero=2"]
    common = ("training.global_batch=16", "training.sequence=16", "model.layers=3")
    ramps = ("training.batch_ramp=4x1,8x2", "training.sequence_ramp=4x2,8x1")
    runs = [verification_run(layout, "tiny-llama", (*common, *ramps), steps=len(chain)) for layout in chain]
    losses = [
        pool.run("cuboid.verification.resume:train_leg", (run, str(tmp_path), step, step + 1), ranks=4)[0]
        for step, run in enumerate(runs)
    ]
    assert judge_chain(0, runs, str(tmp_path), losses)["passed"]


def test_rows_count_what_a_step_had_and_a_resumed_run_continues(pool: Pool, tmp_path: Path) -> None:
    ramps = ("training.batch_ramp=2x3,4x3", "training.sequence_ramp=4x2,8x3", "training.steps=8", "checkpoint.every=4")
    whole = short_run("dp=2", str(tmp_path / "whole"), *ramps)
    pool.run("tests.training.cases:train_rank", (whole,), ranks=2)
    rows = metric_rows(tmp_path / "whole" / "metrics.jsonl")
    assert [row["tokens"] for row in rows] == [32] * 3 + [64] * 3 + [128] * 2
    (tmp_path / "whole" / "run.toml").write_text(dump_run(whole))
    told = measured(open_source(tmp_path / "whole"))
    assert told is not None and told["tokens"] == sum(row["tokens"] for row in rows)
    for layout, steps in (("dp=2,zero=1", 4), ("tp=2,pp=2", 8)):
        part = short_run(
            layout, str(tmp_path / "parts"), *ramps, f"training.steps={steps}", "learning_rate.decay_steps=8"
        )
        pool.run("tests.training.cases:train_rank", (part,), ranks=part.layout.world_size)
    again = metric_rows(tmp_path / "parts" / "metrics.jsonl")
    assert [row["tokens"] for row in again] == [row["tokens"] for row in rows]
    assert [row["labelled_tokens"] for row in again] == [row["labelled_tokens"] for row in rows]


@pytest.mark.parametrize("ramp", ["training.batch_ramp=4x1", "training.sequence_ramp=4x1"])
def test_a_run_is_not_resumed_with_another_ramp(ramp: str) -> None:
    with pytest.raises(UserError, match=f"{ramp} is not"):
        check_same_training(short_run("dp=1", "nowhere"), short_run("dp=1", "nowhere", ramp))
