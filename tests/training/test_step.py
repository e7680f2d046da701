"""One step: what is computed, what skips its update, and an evaluation that is cut short."""

from __future__ import annotations

import math

import pytest
import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.model.batch import MicroBatch
from cuboid.model.transformer import IGNORED
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult, evaluate, start_step, train_step
from tests.parallel.cases import CPU, small_run


def prepared(*overrides: str) -> tuple[Engine, Optimizer, list[MicroBatch]]:
    run = small_run("dp=1", *overrides)
    engine = build_engine(run, 0, CPU)
    return engine, Optimizer(engine, run.optimizer), micro_batches(make_source(run), run, 0, 0, CPU)


def weights(optimizer: Optimizer) -> torch.Tensor:
    return torch.cat([optimizer_shard.master for optimizer_shard in optimizer.optimizer_shards]).clone()


def test_an_overflow_is_a_gradient_too_large_for_fp16_and_nothing_else() -> None:
    scaled = {"tokens": 8, "loss_scale": 1024.0}
    assert StepResult(2.0, math.inf, **scaled).overflowed
    assert StepResult(2.0, math.nan, **scaled).overflowed
    assert not StepResult(2.0, 1.0, **scaled).overflowed
    assert not StepResult(math.nan, math.nan, **scaled).overflowed, "a smaller factor would not help the loss"
    assert not StepResult(2.0, math.inf, tokens=8).overflowed, "there is no factor"
    assert not StepResult(2.0, math.inf, tokens=8, loss_scale=1.0).overflowed, "it cannot become smaller"
    assert not StepResult(2.0, math.inf, tokens=8).is_finite


def test_a_judge_keeps_the_update_from_happening() -> None:
    engine, optimizer, batches = prepared()
    before, seen = weights(optimizer), []

    def judge(result: StepResult) -> str:
        seen.append(result.loss)
        return "loss is a spike"

    pending = start_step(engine, optimizer, batches, 1e-3, judge=judge)
    assert torch.equal(weights(optimizer), before) and optimizer.steps_taken == 0
    assert pending.result().left_out == "loss is a spike" and seen == [pending.result().loss]
    pending = start_step(engine, optimizer, batches, 1e-3, judge=lambda result: "")
    assert not torch.equal(weights(optimizer), before) and optimizer.steps_taken == 1
    assert pending.result().left_out == "" and pending.result().loss == seen[0], "nothing had changed"


def test_a_save_is_waited_for_between_gradients_and_update() -> None:
    engine, optimizer, batches = prepared()
    before, seen = weights(optimizer), []

    def waits() -> None:
        seen.append(torch.equal(weights(optimizer), before))
        seen.append(any(shard.gradient.any() for shard in optimizer.optimizer_shards))

    train_step(engine, optimizer, batches, 1e-3, before_update=waits)
    assert seen == [True, True] and not torch.equal(weights(optimizer), before)


def test_a_wish_to_stop_is_told_with_the_step() -> None:
    engine, optimizer, batches = prepared()
    assert start_step(engine, optimizer, batches, 1e-3, asked=True).result().stops
    assert not start_step(engine, optimizer, batches, 1e-3).result().stops


def test_the_loss_is_a_mean_over_all_tokens_with_labels_not_of_means() -> None:
    engine, optimizer, batches = prepared("training.precision=float64")
    counts = [int((batch.labels != IGNORED).sum()) for batch in batches]
    assert len(set(counts)) > 1, "else a mean of means would be the same"
    losses = [evaluate(engine, [[batch]]) or 0.0 for batch in batches]
    result = start_step(engine, optimizer, batches, 0.0).result()
    assert result.tokens == sum(counts)
    weighed = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert result.loss == pytest.approx(weighed, rel=1e-12)
    assert result.loss != pytest.approx(sum(losses) / len(losses), rel=1e-3)
    assert evaluate(engine, [batches]) == pytest.approx(weighed, rel=1e-12)


def test_a_batch_without_a_single_label_changes_nothing() -> None:
    engine, optimizer, batches = prepared("optimizer.weight_decay=0")
    empty = [MicroBatch(one.tokens, torch.full_like(one.labels, IGNORED), one.documents) for one in batches]
    before = weights(optimizer)
    result = train_step(engine, optimizer, empty, 1e-3)
    assert (result.loss, result.gradient_norm, result.tokens) == (0.0, 0.0, 0)
    assert torch.equal(weights(optimizer), before)
    assert math.isnan(evaluate(engine, [empty]) or 0.0), "of nothing there is no mean"


def test_an_evaluation_that_is_cut_short_has_no_number_and_leaves_no_trace() -> None:
    engine, optimizer, batches = prepared()
    before, asked = weights(optimizer), iter([False, True])
    assert evaluate(engine, [batches] * 5, lambda: next(asked)) is None
    assert next(asked, None) is None, "after the second batch nobody asks again"
    assert evaluate(engine, [batches]) == pytest.approx(evaluate(engine, [batches] * 2))
    assert torch.equal(weights(optimizer), before)
    assert all(shard.gradient is None or not shard.gradient.any() for shard in optimizer.optimizer_shards)
