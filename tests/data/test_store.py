"""A store may come from a stranger: whatever is wrong with it is refused by name, before anything is mapped."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.data.indexed import HEADER, check_pair, open_pair
from cuboid.data.opened import check_data
from cuboid.data.store import check_store, open_store
from cuboid.errors import UserError
from cuboid.spec.run import Run, build_run
from tests.data.corpora import DOCUMENTS, make_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", DOCUMENTS).folder


def make_run(source: Path | str, *overrides: str) -> Run:
    return build_run({"model": "tiny-llama", "data": {"source": str(source)}}, ["training.sequence=32", *overrides])


def refusal(action: Callable[[Any], object], argument: object) -> str:
    with pytest.raises(UserError) as caught:
        action(argument)
    return str(caught.value)


def change_manifest(store: Path, **changes: object) -> None:
    path = store / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_a_store_as_built_is_accepted(store: Path) -> None:
    manifest = check_store(store).manifest
    assert (manifest.documents, manifest.vocabulary, manifest.type) == (7, 257, "uint16")
    check_data(make_run(store))


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "tokens.bin/../../x", "weights.pkl"])
def test_a_manifest_cannot_name_other_files(name: str, store: Path) -> None:
    files = json.loads((store / "manifest.json").read_text())["files"]
    change_manifest(store, files={**files, name: {"size": 1, "sha256": ""}})
    assert refusal(open_store, store) == (
        f"{store}/manifest.json is damaged: it names the file {name}, which no store has; build or copy it again"
    )


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "manifest.json"])
def test_a_link_cannot_leave_the_folder(name: str, store: Path) -> None:
    (store / name).rename(store.parent / name)
    (store / name).symlink_to(store.parent / name)
    assert refusal(open_store, store) == (
        f"{store}/{name} is damaged: it is a link that leaves the folder; build or copy it again"
    )


def test_a_whole_store_may_be_reached_through_a_link(store: Path) -> None:
    (store.parent / "link").symlink_to(store)
    check_store(store.parent / "link")


def test_a_pipe_is_no_file(store: Path) -> None:
    (store / "tokens.bin").unlink()
    os.mkfifo(store / "tokens.bin")
    assert "tokens.bin is damaged: it is missing" in refusal(open_store, store)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 1 << 60}, "it says tokens=1152921504606846976, but tokens.idx says"),
        ({"documents": -1}, "it says documents=-1"),
        ({"type": "float64"}, "it says type=float64, but tokens.idx says uint16"),
        ({"vocabulary": "many"}, 'vocabulary="many" is a string'),
        ({"version": 2}, "its version is 2, not 1"),
        ({"format": "other"}, 'format="other" is unknown'),
        ({"surprise": 1}, "unknown key surprise"),
        ({"files": {}}, "it does not name tokens.bin"),
        ({"files": {"tokens.bin": {"size": 1 << 62, "sha256": ""}}}, "it does not name tokens.idx"),
    ],
)
def test_a_manifest_that_lies_is_refused(changes: dict[str, object], reason: str, store: Path) -> None:
    change_manifest(store, **changes)
    sentence = refusal(open_store, store)
    assert sentence.startswith(f"{store}/manifest.json is damaged: {reason}")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, "\x80\x04N."])
def test_a_manifest_that_is_no_manifest_is_refused(text: str, store: Path) -> None:
    (store / "manifest.json").write_bytes(text.encode("latin-1"))
    assert refusal(open_store, store).startswith(f"{store}/manifest.json is damaged: ")


def test_nothing_is_unpickled(store: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harmed",)

    harmful = pickle.dumps(Harm())
    for name in ("manifest.json", "tokens.idx", "tokens.bin"):
        kept = (store / name).read_bytes()
        (store / name).write_bytes(harmful)
        for action in (open_store, check_store):
            assert f"{name} is damaged" in refusal(action, store)
        (store / name).write_bytes(kept)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx"])
@pytest.mark.parametrize("change", [-1, 1, -400])
def test_files_of_another_size_are_refused(name: str, change: int, store: Path) -> None:
    size = (store / name).stat().st_size
    os.truncate(store / name, max(size + change, 0))
    assert refusal(open_store, store) == (
        f"{store}/{name} is damaged: it has {max(size + change, 0):,} bytes, not {size:,}; build or copy it again"
    )


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), name=st.sampled_from(["tokens.bin", "tokens.idx"]))
def test_any_flipped_byte_is_found(place: float, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = make_store(tmp_path_factory.mktemp("flip") / "store", DOCUMENTS[:3]).folder
    flip(store / name, int(place * (store / name).stat().st_size))
    assert refusal(check_store, store).startswith(f"{store}/{name} is damaged: its checksum is ")
    # A training refuses it too, before it starts.
    assert refusal(check_data, make_run(store)).startswith(f"{store}/{name} is damaged: its checksum is ")


def header(sequences: int, entries: int, code: int = 8, version: int = 1, magic: bytes = b"MMIDIDX\0\0") -> bytes:
    return HEADER.pack(magic, version, code, sequences, entries)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it does not begin like a Megatron index"),
        (b"\x80\x04\x95" + b"." * 90, "it does not begin like a Megatron index"),
        (header(1, 2, version=7) + bytes(28), "its version is 7, not 1"),
        (header(1, 2, code=6) + bytes(28), "6 is not the number of a type of tokens"),
        (header(1 << 60, 2) + bytes(28), "its 1,152,921,504,606,846,976 sequences and 2 documents need"),
        (header(1, 1 << 63) + bytes(28), "its 1 sequences and 9,223,372,036,854,775,808 documents need"),
        (header(0, 1) + bytes(8), "it holds no document"),
        (header(1, 2) + struct.pack("<iqqq", 2, 0, 0, 9), "its documents do not cover its sequences"),
    ],
)
def test_an_index_that_lies_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pair.bin").write_bytes(np.array([1, 2], dtype="<u2").tobytes())
    (tmp_path / "pair.idx").write_bytes(data)
    assert refusal(open_pair, tmp_path / "pair").startswith(f"{tmp_path}/pair.idx is damaged: {reason}")


@pytest.mark.parametrize("last", [3, 1, -5, 1 << 30])
def test_tokens_that_do_not_fit_the_index_are_refused(last: int, tmp_path: Path) -> None:
    (tmp_path / "pair.bin").write_bytes(np.array([1, 2], dtype="<u2").tobytes())
    (tmp_path / "pair.idx").write_bytes(header(1, 2) + struct.pack("<iqqq", last, 0, 0, 1))
    assert refusal(open_pair, tmp_path / "pair").startswith(f"{tmp_path}/pair.bin is damaged: ")


def test_an_index_whose_middle_lies_is_found_by_reading_it(tmp_path: Path) -> None:
    (tmp_path / "pair.bin").write_bytes(np.array([1, 2, 3], dtype="<u2").tobytes())
    (tmp_path / "pair.idx").write_bytes(header(3, 3) + struct.pack("<iiiqqqqqq", 1, 1, 1, 0, 400, 4, 0, 2, 3))
    assert "its sequences do not follow one another" in refusal(check_pair, tmp_path / "pair")
    (tmp_path / "pair.idx").write_bytes(header(3, 4) + struct.pack("<iiiqqqqqqq", 1, 1, 1, 0, 2, 4, 0, 2, 1, 3))
    assert "its documents do not follow one another" in refusal(check_pair, tmp_path / "pair")


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pair.bin").write_bytes(b"\1\0")
    assert refusal(check_data, make_run(tmp_path / "pair")) == (
        f"{tmp_path}/pair.idx is missing; a Megatron pair is pair.bin beside pair.idx"
    )


def test_a_vocabulary_too_small_is_refused_before_the_start(store: Path) -> None:
    assert refusal(check_data, make_run(store, "model.vocab=200")) == (
        f"model.vocab=200 is smaller than the 257 tokens of data.source={store}; use vocab=257 or more"
    )
    # A bare pair does not say how many tokens its tokenizer has: they are read.
    assert "is smaller than the 257 tokens" in refusal(check_data, make_run(store / "tokens", "model.vocab=256"))
    check_data(make_run(store / "tokens", "model.vocab=257"))


def test_text_is_refused_with_the_command_that_turns_it_into_tokens(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("{}")
    assert refusal(check_data, make_run(tmp_path / "corpus.jsonl")) == (
        f"data.source={tmp_path}/corpus.jsonl is not made of tokens; run `cuboid data build {tmp_path}/corpus.jsonl "
        "-o corpus-tokens` (with --completions for prompts and completions) and use data.source=corpus-tokens"
    )


def test_too_few_tokens_for_one_sample_are_refused(store: Path) -> None:
    sentence = refusal(check_data, make_run(store, "training.sequence=100000"))
    assert (
        sentence.startswith("training.sequence=100000 is too long for the ") and "; use training.sequence=" in sentence
    )
    check_data(make_run(store, "training.sequence=100000", "data.packing=padded"))
