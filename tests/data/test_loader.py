"""The global batch does not depend on how many replicas share it, nor on the width of micro-batches."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.data.loader import evaluation_batches, micro_batches
from cuboid.data.source import make_source, make_validation_source
from cuboid.errors import UserError
from cuboid.model.batch import MicroBatch
from cuboid.spec.run import Run, build_run
from tests.data.corpora import make_store

CPU = torch.device("cpu")


def make_run(layout: str, global_batch: int = 16, seed: int = 0) -> Run:
    training = {"global_batch": global_batch, "sequence": 8, "seed": seed}
    return build_run({"model": "tiny-llama", "layout": layout, "training": training, "data": {"source": "synthetic"}})


def global_batch(run: Run, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all replicas take at one step, one after another."""
    source = make_source(run)
    batches = [batch for replica in range(run.layout.dp) for batch in micro_batches(source, run, step, replica, CPU)]
    return torch.cat([batch.tokens for batch in batches]), torch.cat([batch.labels for batch in batches])


@given(
    replicas=st.sampled_from([1, 2, 4, 8, 16]),
    width=st.sampled_from([1, 2, 3]),
    per_replica=st.integers(1, 3),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 1000),
)
def test_replicas_share_the_batch_of_one(replicas: int, width: int, per_replica: int, step: int, seed: int) -> None:
    size = replicas * width * per_replica
    shared = global_batch(make_run(f"dp={replicas},micro_batch={width}", size, seed), step)
    alone = global_batch(make_run("dp=1", size, seed), step)
    assert all(torch.equal(one, two) for one, two in zip(shared, alone, strict=True))


def test_changing_the_replicas_in_the_middle_loses_and_repeats_nothing() -> None:
    steady = [global_batch(make_run("dp=1"), step)[0] for step in range(6)]
    changing = [global_batch(make_run(f"dp={replicas}"), step)[0] for step, replicas in enumerate((2, 2, 4, 8, 16, 1))]
    assert all(torch.equal(one, two) for one, two in zip(steady, changing, strict=True))
    assert len({tuple(tokens.tolist()) for batch in changing for tokens in batch}) == 6 * 16


def test_other_dimensions_do_not_touch_the_data() -> None:
    plain, wide = make_run("dp=2"), make_run("dp=2,tp=2,pp=4,zero=3,schedule=zb1p")
    assert torch.equal(global_batch(plain, 3)[0], global_batch(wide, 3)[0])


def test_micro_batches_have_their_width_and_follow_the_order() -> None:
    run = make_run("dp=2,micro_batch=4", global_batch=24, seed=5)
    source = make_source(run)
    batches = micro_batches(source, run, 7, 1, CPU)
    assert len(batches) == run.micro_batches == 3
    assert all(batch.tokens.shape == batch.labels.shape == (4, 8) for batch in batches)
    for place, row in enumerate(torch.cat([batch.tokens for batch in batches])):
        assert torch.equal(row, source.at(7 * 24 + 12 + place)[0])


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx"])
def test_a_store_that_was_cut_short_is_named_before_it_is_read(tmp_path: Path, packing: str, name: str) -> None:
    store, other = (make_store(tmp_path / name, ["a document of some length"] * 40).folder for name in ("cut", "other"))
    mixture = {str(other): 1.0, str(store): 1.0}
    table = {"model": "tiny-llama", "data": {"mixture": mixture, "packing": packing, "validation_fraction": 0.2}}
    run = build_run(table, ["training.sequence=8", "training.global_batch=4", "evaluation.every=1"])
    source, (held_out, length) = make_source(run), make_validation_source(run)

    def read() -> list[MicroBatch]:
        evaluation = next(evaluation_batches(held_out, length, run, 0, CPU))
        return [*micro_batches(source, run, 0, 0, CPU), *evaluation]

    expected = [batch.tokens for batch in read()]
    size = (store / name).stat().st_size
    os.truncate(store / name, size - 1)
    with pytest.raises(UserError, match=rf"cut/{name} is damaged: it has {size - 1:,} bytes, not {size:,}; build or"):
        read()
    os.truncate(store / name, size)
    (store / name).rename(tmp_path / "kept")
    assert all(map(torch.equal, expected, (batch.tokens for batch in read()))), "the system keeps what is mapped"
    (store / name).write_bytes(b"")
    assert all(map(torch.equal, expected, (batch.tokens for batch in read()))), "this is another file"
