"""Held-out documents: training never sees them, evaluation sees each of their samples once."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.data.loader import evaluation_batches, micro_batches
from cuboid.data.opened import split_documents
from cuboid.data.source import make_source, make_validation_source
from cuboid.errors import UserError
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import Run, build_run
from tests.data.corpora import make_store

CPU = torch.device("cpu")


@given(documents=st.integers(2, 5000), fraction=st.floats(0.001, 0.9))
def test_every_document_is_on_one_side(documents: int, fraction: float) -> None:
    if int(documents * fraction) < 1:
        with pytest.raises(UserError, match=r"leaves nothing on one side; use .* or more"):
            split_documents(documents, fraction, "store")
        return
    split = split_documents(documents, fraction, "store")
    sides = [
        [index for first, last in ranges for index in range(first, last)] for ranges in (split.training, split.held_out)
    ]
    assert sorted(sides[0] + sides[1]) == list(range(documents))
    assert len(sides[1]) == int(documents * fraction)


def test_the_held_out_documents_are_spread_over_the_source() -> None:
    held = split_documents(10_000, 0.01, "store").held_out
    assert len(held) == 64
    assert all(
        stripe * 10_000 // 64 <= first < last <= (stripe + 1) * 10_000 // 64
        for stripe, (first, last) in enumerate(held)
    )


def test_nothing_held_out_is_one_range() -> None:
    split = split_documents(7, 0.0, "store")
    assert (split.training, split.held_out) == (((0, 7),), ())


def make_run(source: Path | str, *overrides: str, layout: str = "dp=1") -> Run:
    table = {"model": "tiny-llama", "layout": layout, "data": {"source": str(source)}}
    return build_run(table, ["training.sequence=10", "training.global_batch=8", *overrides])


def numbered(folder: Path, documents: int = 60) -> Path:
    """Every document is one character, repeated: a sample tells which documents it holds."""
    return make_store(folder / "store", [chr(33 + index) * 35 for index in range(documents)]).folder


def test_training_never_sees_what_is_held_out(tmp_path: Path) -> None:
    run = make_run(numbered(tmp_path), "data.validation_fraction=0.2")
    source = make_source(run)
    trained = {token for position in range(600) for tensor in source.at(position) for token in tensor.tolist()}
    validation, length = make_validation_source(run)
    held = {token for position in range(length) for tensor in validation.at(position) for token in tensor.tolist()}
    assert trained & held == {256}
    assert len(held) - 1 == 12 and len(trained) - 1 == 48


def test_evaluation_takes_each_sample_once_whatever_the_layout(tmp_path: Path) -> None:
    texts = [" ".join(str(1000 * index + number) for number in range(12)) for index in range(60)]
    store = make_store(tmp_path / "store", texts).folder
    overrides = ("data.validation_fraction=0.2", "evaluation.every=5", "evaluation.batches=100")
    taken = []
    for layout in ("dp=1", "dp=2", "dp=4,micro_batch=2"):
        run = make_run(store, *overrides, layout=layout)
        source, length = make_validation_source(run)
        replicas = [list(evaluation_batches(source, length, run, replica, CPU)) for replica in range(run.layout.dp)]
        assert len({len(batches) for batches in replicas}) == 1
        rows = [
            torch.cat((tokens, labels)).tolist()
            for together in zip(*replicas, strict=True)
            for batches in together
            for batch in batches
            for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
        ]
        taken.append(rows)
    assert taken[0] == taken[1] == taken[2]
    counted = [tuple(row) for row in taken[0] if set(row[10:]) != {IGNORED}]
    assert len(counted) == length == len(set(counted))
    assert len(taken[0]) % 8 == 0


def test_evaluation_is_as_long_as_asked_and_always_the_same(tmp_path: Path) -> None:
    run = make_run(numbered(tmp_path), "data.validation_fraction=0.5", "evaluation.every=5", "evaluation.batches=2")
    source, length = make_validation_source(run)
    first, second = (list(evaluation_batches(source, length, run, 0, CPU)) for _ in range(2))
    assert len(first) == 2 and sum(len(batches) for batches in first) == 16
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))


def test_a_source_of_its_own_for_evaluation(tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", ["z" * 100]).folder
    run = make_run(numbered(tmp_path), f"data.validation={other}", "evaluation.every=1")
    source, length = make_validation_source(run)
    assert length == 10
    assert {token for position in range(length) for token in source.at(position)[0].tolist()} == {ord("z")}
    assert set(source.at(length)[1].tolist()) == {IGNORED}
    # The training keeps all of its own source.
    assert torch.equal(make_source(run).at(3)[0], make_source(make_run(tmp_path / "store")).at(3)[0])


def test_a_mixture_is_held_out_source_by_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_store(tmp_path / name, [name * 30 for _ in range(10 if name == "a" else 20)])
    mixture = {str(tmp_path / "a"): 0.5, str(tmp_path / "b"): 0.5}
    table = {"model": "tiny-llama", "data": {"mixture": mixture, "validation_fraction": 0.5}}
    source, length = make_validation_source(build_run(table, ["training.sequence=10"]))
    counted = [int(source.at(p)[0][0]) for p in range(length) if set(source.at(p)[1].tolist()) != {IGNORED}]
    assert (counted.count(ord("a")) > 10) and (counted.count(ord("b")) > 25)


def test_python_itself_can_be_held_out() -> None:
    run = make_run("python-stdlib", "data.validation_fraction=0.05")
    source, length = make_validation_source(run)
    assert length > 1000 and source.at(0)[0].shape == (10,)
    assert micro_batches(make_source(run), run, 0, 0, CPU)[0].tokens.shape == (1, 10)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["evaluation.every=10"],
            "evaluation.every=10 has no held-out data; use data.validation_fraction=0.01 or name",
        ),
        (["evaluation.batches=0"], "evaluation.batches=0 is too small"),
        (["evaluation.every=-1"], "evaluation.every=-1 is too small"),
        (["data.validation_fraction=1.5"], "data.validation_fraction=1.5 is no part of the documents"),
        (["data.validation_fraction=0.1", "data.validation=x"], "both choose the held-out data; use one of them"),
        (["data.validation_fraction=0.1", "data.source=synthetic"], "data.source=synthetic has no documents"),
        (["data.source="], 'data.source="" names no data'),
        (["data.packing=folded"], 'data.packing="folded" is unknown; use packed or padded'),
    ],
)
def test_what_cannot_be_held_out_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        build_run({"model": "tiny-llama"}, overrides)
    assert sentence in str(caught.value)
