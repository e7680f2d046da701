"""Which files a list of sources means, in which order, and of which format each is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cuboid.errors import UserError
from cuboid.spec.suggest import either

Format = Literal["text", "jsonl", "parquet", "arrow"]

COMPRESSED = (".gz", ".zst")
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Ending -> format; every other file is text."""
SAMPLES, SAMPLE = 16, 4096


@dataclass(frozen=True)
class InputFile:
    path: Path
    name: str
    """As the manifest calls it: relative to the source that was named, so that a moved corpus keeps its name."""
    format: Format
    size: int
    fingerprint: str
    """Of its size and of bytes taken evenly from it."""
    modified: int


def find_inputs(sources: Sequence[str]) -> list[InputFile]:
    """Files in the order of the sources; those of a folder sorted by name, hidden ones skipped."""
    found = [file for source in sources for file in _expand(Path(source))]
    if not found:
        raise UserError(
            f"source={' '.join(sources)} holds no file; name text, JSON Lines, Parquet or a datasets folder"
        )
    return found


def _expand(source: Path) -> Iterator[InputFile]:
    if source.is_file():
        yield _input_file(source, source.name)
    elif not source.is_dir():
        raise UserError(f"source={source} does not exist; name a file or a folder")
    elif (source / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in source.glob("*/state.json"))
        raise UserError(f"source={source} holds several splits; use {either(f'{source / split}' for split in splits)}")
    elif (source / "state.json").is_file() and (source / "dataset_info.json").is_file():
        for name in _dataset_files(source / "state.json"):
            yield _input_file(source / name, f"{source.name}/{name}")
    elif (source / "manifest.json").is_file() and (source / "tokens.idx").is_file():
        raise UserError(f"source={source} is a store, which holds tokens already; use it as data.source")
    else:
        for path in sorted(source.rglob("*"), key=lambda path: path.relative_to(source).parts):
            relative = path.relative_to(source)
            if path.is_file() and not any(part.startswith(".") for part in relative.parts):
                yield _input_file(path, f"{source.name}/{relative.as_posix()}")


def _dataset_files(state: Path) -> list[str]:
    try:
        names = [str(entry["filename"]) for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{state} is damaged: it names no _data_files; save the dataset again") from None
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{state} is damaged: its file {name} is outside the folder; save the dataset again")
    return names


def _input_file(path: Path, name: str) -> InputFile:
    if path.suffix in (".bin", ".idx"):
        raise UserError(f"source={path} holds tokens already; use {path.with_suffix('')} as data.source")
    stem = Path(path.stem) if path.suffix in COMPRESSED else path
    kind: Format = FORMATS.get(stem.suffix, "text")
    if path.suffix in COMPRESSED and kind in ("parquet", "arrow"):
        raise UserError(f"source={path} is compressed twice; decompress it first")
    try:
        status = path.stat()
        return InputFile(path, name, kind, status.st_size, _fingerprint(path, status.st_size), status.st_mtime_ns)
    except OSError as error:
        raise UserError(f"source={path} cannot be read: {error.strerror}") from None


def _fingerprint(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for place in range(SAMPLES):
            file.seek(max(size - SAMPLE, 0) * place // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]
