"""Causes in words, of numbers that are made here."""

from __future__ import annotations

import pytest
import torch

from cuboid.training.checks.hypotheses import RATE, named_factor, shifted, step_and_decay
from cuboid.verification.make import verification_run


def test_a_factor_of_an_activation_is_no_number_of_replicas() -> None:
    run = verification_run("dp=2,tp=2", "tiny-gemma3")
    assert named_factor(1 / 8, run, 4) == "factor 0.125 = 1/(dp × micro-batches)"
    assert named_factor(1 / 8, run, 4, of_activations=True) == "factor 0.125 = 1/embedding_scale"
    assert named_factor(0.25, run, 4, of_activations=True) == "factor 0.25 = 1/tp²"
    assert named_factor(2.5, verification_run("dp=2", "tiny-deepseek"), 4, of_activations=True).endswith("scaling")


@pytest.mark.parametrize("by", [1, -2, 64])
def test_a_shard_that_begins_at_another_place_is_seen_as_that(by: int) -> None:
    whole = torch.randn(1000, dtype=torch.float64)
    right, observed = whole[300:700], whole[300 - by : 700 - by]
    explains = [told for told, make in shifted(observed, right) if torch.equal(make(), observed)]
    assert explains == [f"its elements are shifted by {abs(by)}: a shard begins at another place"]


def test_a_wrong_step_beside_a_right_decay() -> None:
    step, decay = torch.randn(2, 100, dtype=torch.float64)
    told = step_and_decay(0.5 * step + decay, step, decay, 1e-4)
    assert told == f"{RATE}: factor 0.5, beside a weight decay that is right"
    assert step_and_decay(step + 2 * decay, step, decay, 1e-4) == "weight decay is applied 2 times"
