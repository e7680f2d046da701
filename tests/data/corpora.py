"""One small corpus in every format, and a tokenizer trained on it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import tokenizers
import zstandard

from cuboid.data.build import BuildRequest, build
from cuboid.data.store import Store, open_store

DOCUMENTS = [
    "The first document.\nIt has two lines.",
    "Grüße, 世界! \U0001f600 \u2028 and a line separator inside",
    'quotes " and \\ backslashes \t tabs, \r\n and a carriage return',
    "x",
    "a longer one: " + " ".join(f"word{number}" for number in range(700)),
    "def function(argument):\n    return argument + 1\n",
    "the last",
]


def write_formats(folder: Path, documents: list[str]) -> dict[str, Path]:
    """Format -> path, each holding the same documents in the same order."""
    import datasets

    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(documents))
    plain = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" for text in documents)
    folder.mkdir(parents=True)
    (folder / "text").mkdir()
    for number, text in enumerate(documents):
        (folder / "text" / f"{number:04d}.txt").write_bytes(text.encode())
    (folder / "lines.jsonl").write_text(lines, encoding="utf-8")
    (folder / "unescaped.jsonl").write_text(plain, encoding="utf-8", newline="\n")
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    half = len(lines) // 2
    frames = [zstandard.compress(part.encode()) for part in (lines[:half], lines[half:])]
    (folder / "lines.jsonl.zst").write_bytes(b"".join(frames))
    table = pa.table({"other": list(range(len(documents))), "text": documents})
    pa.parquet.write_table(table, folder / "rows.parquet", row_group_size=3)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(folder / "dataset", num_shards=2)
    names = ("text", "lines.jsonl", "unescaped.jsonl", "lines.jsonl.gz", "lines.jsonl.zst", "rows.parquet", "dataset")
    return {name: folder / name for name in names}


def train_tokenizer(path: Path, vocabulary: int = 400) -> Path:
    """A byte-level BPE, small enough to train in a moment."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    tokenizer.save(str(path))
    return path


def make_store(path: Path, documents: list[str], tokenizer: str = "byte") -> Store:
    source = path.with_name(f"{path.name}.jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    build(BuildRequest(sources=(str(source),), output=path, tokenizer=tokenizer))
    return open_store(path)


def make_completions(path: Path, rows: list[dict[str, object]]) -> Store:
    source = path.with_name(f"{path.name}.jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(BuildRequest(sources=(str(source),), output=path, kind="completions"))
    return open_store(path)
