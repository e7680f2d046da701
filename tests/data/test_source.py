"""Sources: real text in consecutive windows, random tokens with labels masked unevenly, and what is refused."""

import ast

import pytest
import torch

from cuboid.data.corpus import Corpus, Packed, Synthetic
from cuboid.data.opened import check_data, open_source
from cuboid.data.order import sample_at
from cuboid.data.source import make_source
from cuboid.data.tokenizer import END_OF_DOCUMENT
from cuboid.errors import UserError
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import build_run


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
