"""Ranks that should hold the same values are compared, whatever the reason they should; a flipped bit is found."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.spec.run import build_run
from cuboid.training.replicas import Deviation

NORM, QUERY, TOKENS = "layers.0.attention_norm.weight", "layers.0.attention.query.weight", "embedding.token.weight"


@pytest.mark.parametrize(
    ("layout", "model", "culprit", "name", "ranks", "others"),
    [
        ("dp=4", "tiny-llama", 2, QUERY, (2,), (0, 1, 3)),
        ("dp=2", "tiny-llama", 1, QUERY, (0, 1), ()),
        ("dp=2,tp=2,sequence_parallel=true", "tiny-llama", 3, NORM, (3,), (0, 1, 2)),
        ("cp=2,tp=2", "tiny-llama", 1, QUERY, (1, 3), ()),
        ("dp=4,zero=3,shard=2", "tiny-llama", 0, NORM, (0, 2), ()),
    ],
)
def test_a_flipped_bit_names_the_rank(
    pool: Pool, layout: str, model: str, culprit: int, name: str, ranks: tuple[int, ...], others: tuple[int, ...]
) -> None:
    training = {"global_batch": 8, "sequence": 16, "device": "cpu"}
    run = build_run({"model": model, "layout": layout, "training": training}, ["model.layers=2"])
    answers = pool.run("tests.training.bad_step_jobs:flipped", (run, culprit, name), ranks=run.layout.world_size)
    assert all(answer == answers[0] for answer in answers), "all ranks say the same"
    sound, found, later = answers[0]
    assert sound == []
    assert found == [Deviation(f"{name} (master)", ranks, others)]
    assert later, "it does not go away"
