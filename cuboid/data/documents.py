"""From a list of sources to documents: which files it means, the rows of each format, and the texts to be tokenised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cuboid.data.chat import INSTEAD, Renderer
from cuboid.errors import UserError, either
from cuboid.readers import (
    LARGEST,
    Unreadable,
    checked_batches,
    is_text,
    open_arrow,
    open_inflated,
    open_parquet,
    parse_json,
    plain_file,
    read_json,
    read_line,
)

# Which files a list of sources means, in which order, and of which format each is.


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
        names = [str(entry["filename"]) for entry in read_json(state)["_data_files"]]
    except (Unreadable, KeyError, TypeError):
        raise UserError(f"{state} is damaged: it names no _data_files; save the dataset again") from None
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{state} is damaged: its file {name} is outside the folder; save the dataset again")
    return names


def _input_file(path: Path, name: str) -> InputFile:
    if not is_text(name):
        raise UserError(f"source={path} has a name that is not UTF-8 text; rename it")
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
    except Unreadable as error:
        raise UserError(f"source={error}") from None


def _fingerprint(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with plain_file(path) as file:
        for place in range(SAMPLES):
            file.seek(max(size - SAMPLE, 0) * place // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]


# Rows of input files: text, JSON Lines, Parquet, and the Arrow files of a datasets folder.


MOST_BLANK = 1_000_000
"""Lines in a row: more are no file of rows, and take minutes to skip."""
ROWS = 256
"""Rows of a Parquet file decoded together."""


@dataclass(frozen=True)
class Row:
    number: int
    """Its place in the file, from 0."""
    values: dict[str, Any]
    position: int
    """Bytes of the file read so far."""


def read_rows(file: InputFile, columns: Sequence[str], skip: int = 0) -> Iterator[Row]:
    """Rows with at least those of the columns that the file has, from row number `skip` on. A text file is one row
    whose first column is its text."""
    readers = {"text": _read_text, "jsonl": _read_lines, "parquet": _read_parquet, "arrow": _read_arrow}
    return readers[file.format](file, columns, skip)


def _read_text(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    if skip:
        return
    with open_inflated(file.path)[1] as stream:
        data = _guarded(file, lambda: stream.read(LARGEST + 1))
    if len(data) > LARGEST:
        raise UserError(f"{file.path} holds more than the {LARGEST:,} bytes a text may have; write JSON Lines instead")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file.path} is not UTF-8 text at byte {error.start}; convert it or omit it") from None
    yield Row(0, {columns[0]: text}, file.size)


def _read_lines(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    raw, stream = open_inflated(file.path)
    with stream:
        number = blank = 0
        while line := _guarded(file, partial(read_line, stream, file.path, number)):
            blank = blank + 1 if line.isspace() else 0
            if blank > MOST_BLANK:
                raise UserError(f"{file.path} has {blank:,} empty lines in a row; write one row per line")
            if number >= skip and not blank:
                yield Row(number, _parse(file, number, line), raw.tell())
            number += 1


def _parse(file: InputFile, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = parse_json(line, finite=False)
        if b"\\u" in line:
            json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.path} line {number + 1} is not JSON: {error}; mend it or omit it") from None
    if not isinstance(values, dict):
        raise UserError(f"{file.path} line {number + 1} is not a JSON object; write one object with the text per line")
    return values


def _read_parquet(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    arrow = _import_arrow(file)
    try:
        table = open_parquet(file.path)
        kept = _present(file, columns, table.schema_arrow.names)
        batches = table.iter_batches(ROWS, columns=kept, use_threads=False)
        yield from _rows(file, batches, table.metadata.num_rows, skip)
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _unreadable(file, error) from None


def _read_arrow(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    arrow = _import_arrow(file)
    try:
        with open_arrow(file.path) as source:
            stream = arrow.ipc.open_stream(source)
            kept = _present(file, columns, stream.schema.names)
            # The number of rows stands nowhere in a stream: its bytes tell how far it is read.
            yield from _rows(file, (batch.select(kept) for batch in stream), 0, skip, source.tell)
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _unreadable(file, error) from None


def _rows(file: InputFile, batches: Any, total: int, skip: int, tell: Any = None) -> Iterator[Row]:
    number = 0
    for batch in checked_batches(batches, file.path):
        if number + batch.num_rows > skip:
            for values in batch.slice(max(skip - number, 0)).to_pylist():
                place = max(number, skip)
                position = tell() if tell else file.size * (place + 1) // max(total, 1)
                yield Row(place, values, position)
                number, skip = place + 1, place + 1
        else:
            number += batch.num_rows


def _present(file: InputFile, columns: Sequence[str], names: Sequence[str]) -> list[str]:
    kept = [column for column in columns if column in names]
    if not kept:
        raise UserError(f"{file.path} has no column {either(columns)}; it has {', '.join(names)}")
    return kept


def _guarded(file: InputFile, read: Any) -> bytes:
    """What `read` returns; a file cut short or damaged is named."""
    try:
        return bytes(read())
    except (OSError, EOFError) as error:
        raise _unreadable(file, error) from None
    except Exception as error:  # zlib and zstandard each raise an error of their own
        if type(error).__module__.split(".")[0] in ("zlib", "zstd", "zstandard"):
            raise _unreadable(file, error) from None
        raise


def _unreadable(file: InputFile, error: Exception) -> UserError:
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{file.path} is damaged: {said}; copy it again or omit it")


def _import_arrow(file: InputFile) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{file.path} needs a package that is not installed; pip install pyarrow") from None
    return pyarrow


# Documents of input files, as texts to be tokenised: plain documents, or prompts and completions.


Kind = Literal["text", "completions"]
Document = tuple[str, ...]
"""Of kind text: the text. Of kind completions: a prompt, its completion, and so on in turns."""

COMPLETION_FIELDS = ("prompt", "completion", "messages")


@dataclass
class Chunk:
    """Consecutive documents: the work of one process, decided by the input alone."""

    number: int
    documents: list[Document] = field(default_factory=list)
    end: tuple[int, int] = (0, 0)
    """Where the next chunk begins: number of the input file, and of the row in it."""
    empty: int = 0
    """Documents without any text, of completions without an answer, which are omitted."""
    read: int = 0
    """Bytes of all input files read up to here."""


def read_chunks(
    files: Sequence[InputFile],
    kind: Kind,
    column: str,
    size: int,
    start: tuple[int, int] = (0, 0),
    number: int = 0,
    chat: Renderer | None = None,
) -> Iterator[Chunk]:
    """Chunks of at least `size` characters, from a place where a chunk begins; the same whenever they are read.
    `chat`: how messages are written."""
    columns = (column,) if kind == "text" else COMPLETION_FIELDS
    chunk, held = Chunk(number), 0
    before = sum(file.size for file in files[: start[0]])
    for index in range(start[0], len(files)):
        file = files[index]
        for row in read_rows(file, columns, start[1] if index == start[0] else 0):
            document = (_field(file, row, column),) if kind == "text" else _turns(file, row, chat)
            length = sum(map(len, document))
            if length:
                chunk.documents.append(document)
            else:
                chunk.empty += 1
            held += length
            chunk.end, chunk.read = (index, row.number + 1), before + row.position
            if held >= size:
                yield chunk
                chunk, held = Chunk(chunk.number + 1), 0
        before += file.size
    if chunk.documents or chunk.empty:
        yield chunk


def _turns(file: InputFile, row: Row, chat: Renderer | None) -> Document:
    if row.values.get("messages") is not None:
        return _conversation(file, row, chat)
    if file.format == "text":
        raise UserError(f"{file.path} is text without prompts; use JSON Lines with the fields prompt and completion")
    return _field(file, row, "prompt"), _field(file, row, "completion")


def _conversation(file: InputFile, row: Row, chat: Renderer | None) -> Document:
    """What the assistant says, and the mark that ends it, is to be learned."""
    messages = row.values["messages"]
    for message in messages if isinstance(messages, list) else [None]:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{_place(file, row)} has messages without role and content; write both as strings")
    if chat is None:
        raise UserError(f"{_place(file, row)} has messages, and the tokenizer has no chat template; {INSTEAD}")
    return chat.turns(messages, _place(file, row))


def _field(file: InputFile, row: Row, name: str) -> str:
    value: Any = row.values.get(name)
    if isinstance(value, str):
        return value
    if name in row.values:
        raise UserError(f"{_place(file, row)} has field {name} of type {type(value).__name__}; it must be a string")
    raise UserError(f"{_place(file, row)} has no field {name}; it has {', '.join(row.values) or 'none'}")


def _place(file: InputFile, row: Row) -> str:
    return f"{file.path} row {row.number + 1}"
