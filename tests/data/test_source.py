"""Sources: real text in consecutive windows, and random tokens whose labels are masked unevenly."""

import ast

import pytest
import torch

from cuboid.data.source import END_OF_DOCUMENT, PythonLibrary, Source, Synthetic, check_vocabulary, make_source
from cuboid.errors import UserError
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import build_run


@pytest.fixture(scope="module")
def library() -> PythonLibrary:
    return PythonLibrary(sequence=256)


def join(source: Source, count: int) -> list[int]:
    """The tokens of the first samples, one after another."""
    return torch.cat([source.sample(index)[0] for index in range(count)]).tolist()


def test_the_library_is_millions_of_tokens(library: PythonLibrary) -> None:
    assert library.size * 256 > 2_000_000


def test_the_library_is_source_code(library: PythonLibrary) -> None:
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


def test_windows_are_consecutive_and_labels_one_ahead(library: PythonLibrary) -> None:
    for index in (0, 1, 77, library.size - 2):
        tokens, labels = library.sample(index)
        following, _ = library.sample(index + 1)
        assert tokens.shape == labels.shape == (256,)
        assert tokens.dtype == labels.dtype == torch.int64
        assert torch.equal(labels[:-1], tokens[1:])
        assert labels[-1] == following[0]
    assert library.sample(library.size - 1)[1].shape == (256,)


def test_the_text_does_not_depend_on_the_sequence(library: PythonLibrary) -> None:
    short = PythonLibrary(sequence=100)
    assert join(short, 64) == join(library, 25)


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    run = build_run({"model": "tiny-llama"}, ["model.vocab=256"])
    for refuse in (check_vocabulary, make_source):
        with pytest.raises(UserError) as caught:
            refuse(run)
        assert str(caught.value) == (
            "model.vocab=256 is smaller than the 257 tokens of data.source=python-stdlib; use vocab=257 or more"
        )
    check_vocabulary(build_run({"model": "tiny-llama"}, ["model.vocab=257"]))
    assert isinstance(
        make_source(build_run({"model": "tiny-llama"}, ["model.vocab=9", "data.source=synthetic"])), Synthetic
    )


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
