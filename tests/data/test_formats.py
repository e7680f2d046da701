"""The same corpus gives the same tokens, whatever the format it comes in."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard

from cuboid.data.build import BuildRequest, build
from cuboid.data.documents import find_inputs, read_chunks
from cuboid.data.indexed import check_pair, open_pair, write_pair
from cuboid.data.opened import open_source
from cuboid.data.store import open_store
from cuboid.errors import UserError
from tests.data.corpora import DOCUMENTS, train_tokenizer, write_formats


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_formats(tmp_path_factory.mktemp("formats") / "corpus", DOCUMENTS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def megatron_pair(prefix: Path, documents: list[list[int]], code: int, kind: str) -> None:
    """As Megatron-LM's IndexedDatasetBuilder writes it, byte by byte."""
    width = np.dtype(kind).itemsize
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(document, dtype=kind).tobytes() for document in documents))
    sizes = [len(document) for document in documents]
    pointers = [width * sum(sizes[:index]) for index in range(len(sizes))]
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(sizes) + 1))
        file.write(struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *pointers))
        file.write(struct.pack(f"<{len(sizes) + 1}q", *range(len(sizes) + 1)))


def expected_bytes() -> list[int]:
    return [token for text in DOCUMENTS for token in (*text.encode(), 256)]


def test_every_format_gives_the_same_stream_of_bytes(formats: dict[str, Path], tmp_path: Path) -> None:
    for name, path in formats.items():
        build(BuildRequest(sources=(str(path),), output=tmp_path / name))
        assert open_store(tmp_path / name).tokens.tokens.tolist() == expected_bytes(), name
    megatron_pair(tmp_path / "pair", [[*text.encode(), 256] for text in DOCUMENTS], 8, "<u2")
    assert open_source(str(tmp_path / "pair")).tokens.tokens.tolist() == expected_bytes()


def test_every_format_gives_the_stream_of_the_tokenizer(
    formats: dict[str, Path], tokenizer: Path, tmp_path: Path
) -> None:
    alone = tokenizers.Tokenizer.from_file(str(tokenizer))
    end = alone.token_to_id("<|endoftext|>")
    expected = [token for text in DOCUMENTS for token in (*alone.encode(text).ids, end)]
    for name, path in formats.items():
        build(BuildRequest(sources=(str(path),), output=tmp_path / name, tokenizer=str(tokenizer)))
        store = open_store(tmp_path / name)
        assert store.tokens.tokens.tolist() == expected, name
        assert (store.manifest.vocabulary, store.manifest.end_of_document) == (alone.get_vocab_size(), end)
        assert (tmp_path / name / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_a_store_is_a_megatron_pair_byte_by_byte(formats: dict[str, Path], tmp_path: Path) -> None:
    build(BuildRequest(sources=(str(formats["lines.jsonl"]),), output=tmp_path / "store"))
    megatron_pair(tmp_path / "oracle", [[*text.encode(), 256] for text in DOCUMENTS], 8, "<u2")
    for ending in ("bin", "idx"):
        assert (tmp_path / "store" / f"tokens.{ending}").read_bytes() == (tmp_path / f"oracle.{ending}").read_bytes()


@pytest.mark.parametrize(("code", "kind"), [(1, "<u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_pairs_of_every_type_are_read(code: int, kind: str, tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6]]
    megatron_pair(tmp_path / "pair", documents, code, kind)
    check_pair(tmp_path / "pair")
    for name in ("pair", "pair.bin", "pair.idx"):
        pair = open_pair(tmp_path / name)
        assert [pair.document(index).tolist() for index in range(pair.documents)] == documents
        assert pair.document_starts(1, 6).tolist() == [3, 4]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    documents = [[np.array([1, 2]), np.array([], dtype=np.int64), np.array([3])], [np.array([4])]]
    pair = write_pair(tmp_path / "pair", documents, np.dtype(np.int32))
    check_pair(tmp_path / "pair")
    assert (pair.documents, pair.sequences, pair.tokens.dtype) == (2, 4, np.int32)
    assert [pair.document(0).tolist(), pair.document(1).tolist()] == [[1, 2, 3], [4]]
    first, starts = pair.sequence_starts(1, 4)
    assert (first, starts.tolist()) == (1, [2, 2, 3])


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json")
    table = json.loads(path.read_text())
    table["model"]["vocab"]["<|far|>"] = 70_000
    far = {"id": 70_000, "content": "<|far|>", "special": True, "single_word": False}
    table["added_tokens"].append({**far, "lstrip": False, "rstrip": False, "normalized": False})
    path.write_text(json.dumps(table))
    (tmp_path / "a.txt").write_text("near <|far|> near")
    build(BuildRequest(sources=(str(tmp_path / "a.txt"),), output=tmp_path / "store", tokenizer=str(path)))
    store = open_store(tmp_path / "store")
    assert (store.manifest.vocabulary, store.manifest.type) == (70_001, "int32")
    assert 70_000 in store.tokens.tokens.tolist()


def test_limits_in_a_tokenizer_file_cut_nothing(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json")
    limited = tokenizers.Tokenizer.from_file(str(path))
    limited.enable_truncation(4)
    limited.enable_padding(length=9)
    limited.save(str(path))
    (tmp_path / "a.txt").write_text(DOCUMENTS[4])
    build(BuildRequest(sources=(str(tmp_path / "a.txt"),), output=tmp_path / "store", tokenizer=str(path)))
    limited.no_truncation()
    limited.no_padding()
    assert open_store(tmp_path / "store").tokens.tokens.tolist()[:-1] == limited.encode(DOCUMENTS[4]).ids


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz", "rows.parquet", "dataset", "text"])
def test_reading_can_begin_at_any_chunk(name: str, formats: dict[str, Path]) -> None:
    files = find_inputs([str(formats[name])])
    whole = list(read_chunks(files, "text", "text", 40))
    assert len(whole) > 2
    for chunk in whole[:-1]:
        rest = list(read_chunks(files, "text", "text", 40, chunk.end, chunk.number + 1))
        assert rest == whole[chunk.number + 1 :]
    total = sum(file.size for file in files)
    assert 0.99 * total < whole[-1].read <= total  # an Arrow stream has a mark after its last row


def write_jsonl(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def refusal(*sources: str, **options: str) -> str:
    with pytest.raises(UserError) as caught:
        build(BuildRequest(sources=sources, output=Path(sources[0]).with_name("refused"), **options))  # type: ignore[arg-type]
    return str(caught.value)


def test_inputs_that_cannot_be_read_are_named(formats: dict[str, Path], tmp_path: Path) -> None:
    good = json.dumps({"text": "good"})
    path = str(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "a.jsonl", good, "{broken")
    assert refusal(path).startswith(f"{path} line 2 is not JSON")
    write_jsonl(tmp_path / "a.jsonl", good, "[1]")
    assert refusal(path).startswith(f"{path} line 2 is not a JSON object")
    write_jsonl(tmp_path / "a.jsonl", good, '{"text": 7}')
    assert refusal(path).startswith(f"{path} row 2 has field text of type int")
    write_jsonl(tmp_path / "a.jsonl", good, '{"body": "b", "id": 1}')
    assert refusal(path) == f"{path} row 2 has no field text; it has body, id"
    write_jsonl(tmp_path / "a.jsonl", '{"text": "\\ud800"}')
    assert refusal(path).startswith(f"{path} line 1 is not JSON")
    assert refusal(str(formats["rows.parquet"]), field="txt").endswith("has no column txt; it has other, text")


def test_damaged_inputs_are_named(formats: dict[str, Path], tmp_path: Path) -> None:
    for name in ("lines.jsonl.gz", "lines.jsonl.zst", "rows.parquet"):
        cut = tmp_path / name
        cut.write_bytes(formats[name].read_bytes()[:-40] + b"\x00" * 3)
        assert refusal(str(cut)).startswith(f"{cut} is damaged: "), name
    # The reader of the zstandard package ends quietly here, and the last documents would be lost.
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    frame = zstandard.compress(lines.encode())
    for keep in range(1, len(frame), 17):
        (tmp_path / "cut.jsonl.zst").write_bytes(frame[:keep])
        assert "cut.jsonl.zst is damaged: " in refusal(str(tmp_path / "cut.jsonl.zst")), keep
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert refusal(str(tmp_path / "latin.txt")).endswith("is not UTF-8 text at byte 3; convert it or omit it")


def test_sources_that_make_no_sense_are_refused(formats: dict[str, Path], tmp_path: Path) -> None:
    megatron_pair(tmp_path / "pair", [[1]], 8, "<u2")
    assert refusal(str(tmp_path / "pair.idx")).endswith(f"holds tokens already; use {tmp_path / 'pair'} as data.source")
    assert "does not exist" in refusal(str(tmp_path / "missing"))
    (tmp_path / "nothing").mkdir()
    assert "holds no file" in refusal(str(tmp_path / "nothing"))
    (tmp_path / "nothing" / "empty.txt").touch()
    assert "holds no text" in refusal(str(tmp_path / "nothing"))


def test_a_dataset_of_several_splits_asks_which(tmp_path: Path) -> None:
    import datasets

    both = datasets.Dataset.from_dict({"text": DOCUMENTS})
    datasets.DatasetDict({"train": both, "test": both}).save_to_disk(tmp_path / "splits")
    assert refusal(str(tmp_path / "splits")).endswith(f"use {tmp_path}/splits/test or {tmp_path}/splits/train")


def test_a_dataset_cannot_name_files_outside_its_folder(formats: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../lines.jsonl"}]}))
    assert "outside the folder" in refusal(str(folder))
    (folder / "state.json").write_text("[]")
    assert "names no _data_files" in refusal(str(folder))
