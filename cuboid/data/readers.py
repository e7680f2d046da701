"""Rows of input files: text, JSON Lines, Parquet, and the Arrow files of a datasets folder."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from cuboid.data.inputs import InputFile
from cuboid.data.zstd_stream import ZstdStream
from cuboid.errors import UserError
from cuboid.spec.suggest import either

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
    with _open(file)[1] as stream:
        data = _guarded(file, stream.read)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file.path} is not UTF-8 text at byte {error.start}; convert it or omit it") from None
    yield Row(0, {columns[0]: text}, file.size)


def _read_lines(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    raw, stream = _open(file)
    with stream:
        number = 0
        while line := _guarded(file, stream.readline):
            if number >= skip and not line.isspace():
                yield Row(number, _parse(file, number, line), raw.tell())
            number += 1


def _parse(file: InputFile, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
        if b"\\u" in line:
            json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.path} line {number + 1} is not JSON: {error}; mend it or omit it") from None
    if not isinstance(values, dict):
        raise UserError(f"{file.path} line {number + 1} is not a JSON object; write one object with the text per line")
    return values


def _read_parquet(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    arrow = _import_arrow(file)
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file.path, memory_map=True)
        kept = _present(file, columns, table.schema_arrow.names)
        yield from _rows(file, table.iter_batches(ROWS, columns=kept, use_threads=False), table.metadata.num_rows, skip)
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _read_arrow(file: InputFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    arrow = _import_arrow(file)
    try:
        with arrow.memory_map(str(file.path)) as source:
            stream = arrow.ipc.open_stream(source)
            kept = _present(file, columns, stream.schema.names)
            # The number of rows stands nowhere in a stream: its bytes tell how far it is read.
            yield from _rows(file, (batch.select(kept) for batch in stream), 0, skip, source.tell)
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _rows(file: InputFile, batches: Any, total: int, skip: int, tell: Any = None) -> Iterator[Row]:
    number = 0
    for batch in batches:
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


def _open(file: InputFile) -> tuple[BinaryIO, BinaryIO]:
    """The file itself, whose position tells the progress, and the stream of its decompressed bytes."""
    raw = file.path.open("rb")
    if file.path.suffix == ".gz":
        return raw, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    if file.path.suffix == ".zst":
        return raw, io.BufferedReader(ZstdStream(raw, file.path), 1 << 20)
    return raw, raw


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
    return UserError(f"{file.path} is damaged: {str(error).splitlines()[0]}; copy it again or omit it")


def _import_arrow(file: InputFile) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{file.path} needs a package that is not installed; pip install pyarrow") from None
    return pyarrow
