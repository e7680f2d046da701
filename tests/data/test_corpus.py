"""Samples from documents: packed or padded, masked across documents, and completions that alone are learned."""

import hashlib
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.data.corpus import Packed, Padded
from cuboid.data.indexed import in_memory, write_pair
from cuboid.data.loader import micro_batches
from cuboid.data.opened import OpenedSource, check_data, data_identity, open_source, same_data
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import Run, build_run, dump_run
from tests.data.corpora import make_completions, make_store

documents = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=20)


def opened(lists: list[list[int]]) -> OpenedSource:
    return OpenedSource("memory", in_memory("memory", iter(np.array(tokens, dtype=np.uint16) for tokens in lists)), 100)


@given(lists=documents, sequence=st.integers(1, 9), mask=st.booleans())
def test_packed_samples_are_the_stream_cut_in_pieces(lists: list[list[int]], sequence: int, mask: bool) -> None:
    corpus = Packed(opened(lists), 100, sequence, [(0, len(lists))], mask)
    stream = [token for tokens in lists for token in tokens]
    firsts = {sum(map(len, lists[:index])) for index in range(len(lists))}
    assert corpus.size == (len(stream) - 1) // sequence
    for index in range(corpus.size):
        tokens, labels = corpus.sample(index)
        start = index * sequence
        assert tokens.tolist() == stream[start : start + sequence]
        expected = [
            IGNORED if mask and place in firsts else stream[place] for place in range(start + 1, start + sequence + 1)
        ]
        assert labels.tolist() == expected
        owners = [sum(first <= place for first in firsts) for place in range(start, start + sequence)]
        assert corpus.documents(index).tolist() == [owner - owners[0] for owner in owners]


@given(lists=documents, sequence=st.integers(1, 9), cuts=st.lists(st.integers(0, 20), min_size=1), mask=st.booleans())
def test_ranges_are_joined_as_if_they_were_neighbours(
    lists: list[list[int]], sequence: int, cuts: list[int], mask: bool
) -> None:
    bounds = sorted(min(cut, len(lists)) for cut in cuts)
    ranges = list(zip(bounds[::2], bounds[1::2], strict=False)) or [(0, len(lists))]
    chosen = [lists[index] for first, last in ranges for index in range(first, last)]
    corpus = Packed(opened(lists), 100, sequence, ranges, mask)
    if not chosen:
        assert corpus.size == 0
        return
    alone = Packed(opened(chosen), 100, sequence, [(0, len(chosen))], mask)
    assert corpus.size == alone.size
    for index in range(corpus.size):
        assert all(map(torch.equal, corpus.sample(index), alone.sample(index)))
        assert torch.equal(corpus.documents(index), alone.documents(index))


@given(lists=documents, sequence=st.integers(1, 9))
def test_padded_samples_are_one_document_each(lists: list[list[int]], sequence: int) -> None:
    corpus = Padded(opened(lists), 100, sequence, [(0, len(lists))])
    assert corpus.size == len(lists)
    for index, document in enumerate(lists):
        tokens, labels = corpus.sample(index)
        assert tokens.shape == labels.shape == (sequence,)
        kept = document[1 : sequence + 1]
        assert labels.tolist() == kept + [IGNORED] * (sequence - len(kept))
        assert tokens.tolist()[: len(kept)] == document[: len(kept)]


def make_run(source: Path, *overrides: str, layout: str = "dp=1") -> Run:
    table = {"model": "tiny-llama", "layout": layout, "data": {"source": str(source)}}
    return build_run(table, ["training.sequence=16", *overrides])


def learned(run: Run, positions: int) -> list[str]:
    """The labels that count, as text."""
    source = make_source(run)
    texts = []
    for position in range(positions):
        labels = [label for label in source.at(position)[1].tolist() if label != IGNORED]
        texts.append("".join("$" if label == 256 else chr(label) for label in labels))
    return texts


ROWS: list[dict[str, object]] = [
    {"prompt": "1+1=", "completion": "TWO"},
    {"prompt": "", "completion": "ALONE"},
    {"prompt": "say nothing", "completion": ""},
    {"prompt": "name a colour: ", "completion": "BLUE"},
]


def test_only_completions_are_learned_padded(tmp_path: Path) -> None:
    store = make_completions(tmp_path / "store", ROWS)
    assert (store.manifest.kind, store.manifest.documents, store.manifest.sequences) == ("completions", 4, 8)
    # The first token of a document without prompt is nobody's label; the last sample is cut at its end.
    run = make_run(store.folder, "data.packing=padded")
    assert sorted(learned(run, 4)) == sorted(["TWO$", "LONE$", "$", "BL"])


def test_only_completions_are_learned_packed(tmp_path: Path) -> None:
    store = make_completions(tmp_path / "store", ROWS * 10)
    run = make_run(store.folder, "training.sequence=7")
    corpus = Packed(open_source(str(store.folder)), 257, 7, [(0, 40)])
    text = "".join(
        "".join("$" if label == 256 else chr(label) for label in corpus.sample(index)[1].tolist() if label != IGNORED)
        for index in range(corpus.size)
    )
    assert ("TWO$ALONE$$BLUE$" * 10).startswith(text) and len(text) > 150
    check_data(run)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "p"}, "row 1 has no field completion; it has prompt"),
        ({"prompt": "p", "completion": None}, "row 1 has field completion of type NoneType; it must be a string"),
        ({"messages": "hi"}, "row 1 has messages without role and content"),
        ({"messages": [{"role": "user"}]}, "row 1 has messages without role and content"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "row 1 has messages, and the tokenizer has no chat template; use rows with prompt and completion, or",
        ),
    ],
)
def test_rows_without_completions_are_named(row: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_completions(tmp_path / "store", [row])
    assert sentence in str(caught.value)


def test_replicas_share_the_batch_of_one(tmp_path: Path) -> None:
    store = make_completions(tmp_path / "store", ROWS * 9).folder
    text = make_store(tmp_path / "text", ["some words " * 40]).folder
    mixture = {str(store): 0.4, str(text): 0.6}
    batches = []
    for layout in ("dp=1", "dp=2", "dp=8,micro_batch=2", "dp=2,tp=2,pp=4"):
        run = build_run(
            {"model": "tiny-llama", "layout": layout, "data": {"mixture": mixture}}, ["training.sequence=8"]
        )
        source = make_source(run)
        taken = [
            batch
            for step in range(5)
            for replica in range(run.layout.dp)
            for batch in micro_batches(source, run, step, replica, torch.device("cpu"))
        ]
        batches.append([torch.cat([getattr(batch, name) for batch in taken]) for name in ("tokens", "labels")])
    for tokens, labels in batches[1:]:
        assert torch.equal(tokens, batches[0][0]) and torch.equal(labels, batches[0][1])
    assert batches[0][0].shape == (80, 8)


def test_a_token_outside_the_vocabulary_is_named_where_it_is_met(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.source=memory holds token 99 near 0, which is not in model.vocab=50"):
        Packed(opened([[1, 99, 3]]), 50, 2, [(0, 1)]).sample(0)


def test_what_a_run_says_of_its_data_survives_its_file(tmp_path: Path) -> None:
    data = {"mixture": {"a/b c": 0.25, 'quo"te': 2.0}, "validation_fraction": 0.1, "mask_across_documents": True}
    run = build_run({"model": "tiny-llama", "data": data, "evaluation": {"every": 3, "batches": 2}})
    assert build_run(tomllib.loads(dump_run(run))) == run
    assert hash(run.data) == hash(run.data)


def test_the_identity_of_data_changes_with_what_is_met(tmp_path: Path) -> None:
    one, two = (make_store(tmp_path / name, [name * 50]).folder for name in ("one", "two"))
    same = make_store(tmp_path / "same", ["one" * 50]).folder
    plain = data_identity(make_run(one))
    assert plain == data_identity(make_run(one, "training.steps=7", layout="dp=2"))
    changes = ["training.seed=1", "training.sequence=8", "data.packing=padded", "data.mask_across_documents=true"]
    others = [data_identity(make_run(one, change)) for change in changes]
    assert len({plain, data_identity(make_run(two)), data_identity(make_run(one / "tokens")), *others}) == 7
    assert same != one


def test_a_pair_with_other_tokens_is_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole up to a bound, and parts of what is beyond it."""
    documents = [[np.full(1 << 16, number, dtype=np.int32)] for number in range(3)]
    write_pair(tmp_path / "pair", documents, np.dtype(np.int32))
    run, path = make_run(tmp_path / "pair"), tmp_path / "pair.bin"
    known, content = data_identity(run), path.read_bytes()
    assert same_data(run, known)
    for bound, place in (
        (1 << 30, 0),
        (1 << 30, len(content) // 2 + 1),
        (1 << 30, len(content) - 4),
        (8, 0),
        (8, 1 << 18),
    ):
        monkeypatch.setattr("cuboid.data.opened.READ_WHOLE", bound)
        known = data_identity(run)
        path.write_bytes(content[:place] + b"\7" + content[place + 1 :])
        assert not same_data(run, known), f"byte {place}, whole up to {bound}"
        path.write_bytes(content)
        assert same_data(run, known)
    index = (tmp_path / "pair.idx").read_bytes()
    write_pair(
        tmp_path / "pair", [documents[0], [documents[1][0], documents[2][0][:0]], documents[2]], np.dtype(np.int32)
    )
    assert not same_data(run, known) and (tmp_path / "pair.idx").read_bytes() != index


def test_a_checkpoint_that_says_the_counts_of_a_pair_alone_is_continued(tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", [[np.arange(90)]] * 3, np.dtype(np.uint16))
    run = make_run(tmp_path / "pair")
    held = {str(tmp_path / "pair"): json.dumps([270, 3, 3])}
    facts = [held, [1.0], "packed", False, 0.0, run.training.sequence, run.training.seed, run.training.global_batch]
    before = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    assert before != data_identity(run) and same_data(run, before)
    write_pair(tmp_path / "pair", [[np.arange(90)]] * 2, np.dtype(np.uint16))
    assert not same_data(run, before)
