"""Sources: real text in consecutive windows, random tokens with labels masked unevenly, and what is refused."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cuboid.data.corpus import Corpus, Packed, Synthetic
from cuboid.data.opened import check_data, open_source
from cuboid.data.source import Pattern, make_source, permuted, sample_at
from cuboid.data.tokenizer import END_OF_DOCUMENT
from cuboid.errors import UserError
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import Run, build_run
from tests.data.corpora import make_store

# The global order of samples: a permutation of each epoch, decided by position and seed alone.


@given(size=st.integers(1, 700), key=st.text(max_size=8))
@example(size=1, key="")
@example(size=2, key="0/0")
@example(size=256, key="0/0")
@example(size=257, key="0/0")
def test_a_permutation_takes_every_sample_once(size: int, key: str) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


@given(size=st.integers(1, 1 << 40), index=st.integers(0, 1 << 40), key=st.text(max_size=8))
def test_large_epochs_stay_inside(size: int, index: int, key: str) -> None:
    assert 0 <= permuted(index % size, size, key) < size


@given(size=st.integers(1, 120), seed=st.integers(0, 1 << 32), epoch=st.integers(0, 1000))
def test_every_epoch_meets_every_sample_once(size: int, seed: int, epoch: int) -> None:
    positions = range(epoch * size, (epoch + 1) * size)
    assert sorted(sample_at(position, size, seed) for position in positions) == list(range(size))


@given(size=st.integers(1, 60), seed=st.integers(0, 99), start=st.integers(0, 500), length=st.integers(0, 200))
def test_no_stretch_of_the_order_repeats_a_sample_more_often_than_it_must(
    size: int, seed: int, start: int, length: int
) -> None:
    counts = Counter(sample_at(position, size, seed) for position in range(start, start + length))
    # A stretch touches at most one epoch more at either end than it holds whole.
    assert max(counts.values(), default=0) <= length // size + 2


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(sample_at(epoch * 50 + index, 50, seed) for index in range(50))

    orders = {order(seed, epoch) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36
    assert tuple(range(50)) not in orders


def test_the_order_mixes_near_and_far() -> None:
    size = 10_000
    steps = [abs(sample_at(position, size, 0) - sample_at(position + 1, size, 0)) for position in range(2000)]
    # Two independent draws lie a third of the range apart on average.
    assert 0.3 < sum(steps) / len(steps) / size < 0.37


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    # A run that is continued must meet the samples it has not met: these numbers may never change.
    assert [sample_at(position, 1000, 0) for position in (0, 1, 999, 1000)] == [819, 106, 109, 32]


# Mixtures: each source has its weight of any number of positions, to less than one sample, and its own order.


@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=9))
@example(weights=[1, 1000])
@example(weights=[997, 1, 1, 1])
@example(weights=[1] * 9)
def test_every_stretch_from_the_start_has_its_shares(weights: list[int]) -> None:
    pattern, total = Pattern(weights), sum(weights)
    counts = [0] * len(weights)
    for position in range(2 * pattern.period + 3):
        source, before = pattern.at(position)
        assert before == counts[source]
        counts[source] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count * total - weight * (position + 1)) < total


@given(
    weights=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    periods=st.integers(0, 1 << 50),
    place=st.integers(0, 100),
)
def test_far_positions_need_no_past(weights: list[int], periods: int, place: int) -> None:
    pattern = Pattern(weights)
    near, far = pattern.at(place), pattern.at(place + periods * pattern.period)
    share = [pattern.at(position)[0] for position in range(pattern.period)].count(near[0])
    assert far == (near[0], near[1] + periods * share)


def test_weights_are_the_decimals_that_were_written() -> None:
    assert Pattern([0.7, 0.2, 0.1]).period == 10
    assert Pattern([0.1, 0.1, 0.1]).period == 3
    assert Pattern([7, 2, 1]).period == Pattern([70.0, 20.0, 10.0]).period == 10
    assert Pattern([5.0]).period == 1


def test_weights_without_a_short_period_are_refused_with_rounder_ones() -> None:
    with pytest.raises(UserError, match=r"use rounder ones, like 0.5556, 0.4444") as caught:
        Pattern([123456789, 98765431])
    assert "123456789, 98765431" in str(caught.value)


def test_all_of_every_source_is_met_after_so_many_positions() -> None:
    pattern = Pattern([3, 1])
    needed = pattern.positions([7, 5])
    met = [pattern.at(position) for position in range(needed)]
    assert {(0, index) for index in range(7)} | {(1, index) for index in range(5)} <= set(met)


def make_run(folder: Path, weights: dict[str, float], *overrides: str) -> Run:
    mixture = {str(folder / name): weight for name, weight in weights.items()}
    table = {"model": "tiny-llama", "data": {"mixture": mixture}, "training": {"sequence": 8}}
    return build_run(table, overrides)


def test_a_mixture_of_stores_trains_on_each_in_its_own_order(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        make_store(tmp_path / name, [letter * 8 * (12 if letter == "a" else 5)])
    source = make_source(make_run(tmp_path, {"a": 0.75, "b": 0.25}, "training.seed=9"))
    letters = ["ab"[int(source.at(position)[0][0]) - ord("a")] for position in range(400)]
    assert letters.count("a") == 300
    # The epochs of one source do not wait for those of the other.
    alone = make_source(
        build_run({"model": "tiny-llama"}, [f"data.source={tmp_path / 'b'}", "training.seed=9", "training.sequence=8"])
    )
    places = [position for position, letter in enumerate(letters) if letter == "b"]
    assert all(source.at(place)[0].equal(alone.at(number)[0]) for number, place in enumerate(places))
    assert all(later - earlier == 4 for earlier, later in pairwise(places))


def test_a_mixture_meets_every_sample_of_each_source_once_in_an_epoch(tmp_path: Path) -> None:
    texts = {
        "a": "".join(chr(33 + index) * 8 for index in range(30)),
        "b": "".join(chr(65 + index) * 8 for index in range(20)),
    }
    for name, text in texts.items():
        make_store(tmp_path / name, [text])
    source = make_source(make_run(tmp_path, {"a": 3, "b": 2}))
    met = [bytes(source.at(position)[0].tolist()) for position in range(50)]
    assert sorted(met) == sorted(letter.encode() * 8 for text in texts.values() for letter in text[::8])
    again = [bytes(source.at(position)[0].tolist()) for position in range(50, 100)]
    assert sorted(again) == sorted(met) and again != met


def test_mixtures_that_make_no_sense_are_refused() -> None:
    for data, sentence in (
        ({"mixture": {}}, "names no source"),
        ({"mixture": {"a": 0.0}}, r"data.mixture.a=0.0 is no weight; use a number above 0"),
        ({"mixture": {"a": 1.0}, "source": "b"}, "data.source=b and data.mixture both name sources"),
        ({"mixture": {"a": "x"}}, "data.mixture.a="),
    ):
        with pytest.raises(UserError, match=sentence):
            build_run({"model": "tiny-llama", "data": data})


def make_library(sequence: int) -> Packed:
    opened = open_source("python-stdlib")
    return Packed(opened, 257, sequence, [(0, opened.tokens.documents)])


@pytest.fixture(scope="module")
def library() -> Packed:
    return make_library(256)


def join(corpus: Corpus, count: int) -> list[int]:
    """The tokens of the first samples, one after another."""
    return torch.cat([corpus.sample(index)[0] for index in range(count)]).tolist()


def test_the_library_is_millions_of_tokens(library: Packed) -> None:
    assert library.size * 256 > 2_000_000


def test_the_library_is_source_code(library: Packed) -> None:
    tokens = join(library, 2000)
    assert min(tokens) >= 0 and max(tokens) == END_OF_DOCUMENT
    documents, current = [], bytearray()
    for token in tokens:
        if token == END_OF_DOCUMENT:
            documents.append(bytes(current))
            current.clear()
        else:
            current.append(token)
    assert len(documents) > 10
    for document in documents:
        assert document
        ast.parse(document)


def test_windows_are_consecutive_and_labels_one_ahead(library: Packed) -> None:
    for index in (0, 1, 77, library.size - 2):
        tokens, labels = library.sample(index)
        following, _ = library.sample(index + 1)
        assert tokens.shape == labels.shape == (256,)
        assert tokens.dtype == labels.dtype == torch.int64
        assert torch.equal(labels[:-1], tokens[1:])
        assert labels[-1] == following[0]
    assert library.sample(library.size - 1)[1].shape == (256,)


def test_the_text_does_not_depend_on_the_sequence(library: Packed) -> None:
    assert join(make_library(100), 64) == join(library, 25)


def test_the_default_source_stands_in_the_keyed_order(library: Packed) -> None:
    source = make_source(build_run({"model": "tiny-llama"}, ["training.seed=3"]))
    for position in (0, 1, library.size - 1, library.size, 5 * library.size + 7):
        expected = library.sample(sample_at(position, library.size, 3))
        assert all(torch.equal(one, two) for one, two in zip(source.at(position), expected, strict=True))


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    run = build_run({"model": "tiny-llama"}, ["model.vocab=256"])
    for refuse in (check_data, make_source):
        with pytest.raises(UserError) as caught:
            refuse(run)
        assert str(caught.value) == (
            "model.vocab=256 is smaller than the 257 tokens of data.source=python-stdlib; use vocab=257 or more"
        )
    check_data(build_run({"model": "tiny-llama"}, ["model.vocab=257"]))
    small = build_run({"model": "tiny-llama"}, ["model.vocab=9", "data.source=synthetic"])
    check_data(small)
    assert make_source(small).at(0)[0].max() < 9


def test_a_source_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"data.source=nowhere does not exist; use python-stdlib, synthetic, or the path"
    ):
        check_data(build_run({"model": "tiny-llama"}, ["data.source=nowhere"]))


def test_synthetic_samples_depend_on_seed_and_index_only() -> None:
    first, again, other = Synthetic(50, 30, seed=1), Synthetic(50, 30, seed=1), Synthetic(50, 30, seed=2)
    again.sample(3)
    for index in (0, 5, first.size - 1):
        assert all(torch.equal(one, two) for one, two in zip(first.sample(index), again.sample(index), strict=True))
        assert not torch.equal(first.sample(index)[0], other.sample(index)[0])
    assert not torch.equal(first.sample(0)[0], first.sample(1)[0])


def test_synthetic_labels_are_one_ahead_and_masked_unevenly() -> None:
    source = Synthetic(50, 40, seed=0)
    counts = set()
    for index in range(60):
        tokens, labels = source.sample(index)
        kept = labels[:-1] != IGNORED
        assert torch.equal(labels[:-1][kept], tokens[1:][kept])
        assert tokens.min() >= 0 and tokens.max() < 50
        counts.add(int((labels != IGNORED).sum()))
    # All, none, and much in between: a mean of means over replicas would not equal the true mean.
    assert {0, 40} < counts and len(counts) > 10


def test_synthetic_documents_are_few_or_many() -> None:
    source = Synthetic(50, 64, seed=0)
    numbers = set()
    for index in range(60):
        documents = source.documents(index)
        assert documents[0] == 0 and set(documents.diff().tolist()) <= {0, 1}
        assert torch.equal(documents, source.documents(index))
        numbers.add(int(documents[-1]) + 1)
    assert 1 in numbers and max(numbers) > 8
