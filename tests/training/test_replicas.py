"""Ranks that should hold the same values are compared, whatever the reason they should; a flipped bit is found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.launch.pool import Pool
from cuboid.spec.run import build_run
from cuboid.training.replicas import Deviation, _judge, checksum, flip_bit

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16])
def test_a_flipped_bit_is_a_small_change_that_the_checksum_sees(dtype: torch.dtype) -> None:
    values = torch.arange(1, 8).to(dtype)
    whole, before = values.clone(), checksum(values)
    assert torch.equal(checksum(values.clone()), before)
    flip_bit(values)
    assert int((values != whole).sum()) == 1 and values.isfinite().all()
    assert not torch.equal(checksum(values), before)
    flip_bit(values)
    assert torch.equal(values, whole)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.data(),
)
def test_no_single_changed_element_leaves_the_checksum_as_it_was(bits: list[int], data: st.DataObject) -> None:
    """Not even one that is no number, of which `==` says that it differs from itself."""
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    place = data.draw(st.integers(0, len(bits) - 1))
    other = data.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda word: word != bits[place]))
    changed = values.clone()
    changed.view(torch.int32)[place] = other
    assert int(checksum(changed)) != int(checksum(values))
    assert int(checksum(values.view(-1, 1).expand(-1, 2))) == 2 * int(checksum(values)), "also of what is a view"


def test_a_majority_is_right_and_where_there_is_none_nobody_is() -> None:
    assert _judge("w", {0: 5, 1: 5, 4: 6}) == Deviation("w", (4,), (0, 1))
    assert _judge("w", {0: 5, 1: 6}) == Deviation("w", (0, 1), ())
    assert _judge("w", {0: 5, 1: 5, 2: 6, 3: 6}) == Deviation("w", (0, 1, 2, 3), ())
    assert _judge("w", {0: 7, 1: 5, 2: 5, 3: 5, 4: 6}) == Deviation("w", (0, 4), (1, 2, 3))


def test_deviations_in_words() -> None:
    assert str(Deviation("w (master)", (4,), (0, 1))) == "rank 4 holds other values of w (master) than rank 0, 1"
    assert str(Deviation("w (master)", (0, 1), ())) == "ranks 0, 1 hold different values of w (master)"
