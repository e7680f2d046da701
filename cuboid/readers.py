"""The one way in: whatever file the program reads comes through here, with bounds on its size, depth, numbers and text.

A reader takes plain files only: a FIFO never ends, a device has no size. What is wrong is an `Unreadable`, one sentence
with the file and what would work. Who knows better words says `problem.reason` in them. The one way out that users
name, the file of `--output`, is at the end."""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from datetime import time as clock
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from cuboid.errors import UserError

LARGEST = 256 << 20
"""Bytes of a file that is read whole; logs of long runs and tokenizers have less."""
LARGEST_TABLE = 48 << 20
"""Bytes of a JSON file: the largest tokenizers have 33 MB."""
LARGEST_TOML = 1 << 20
"""Bytes of a TOML file, of which Python reads a megabyte in a second: run files have some thousand."""
LARGEST_ROW = 16 << 20
"""Bytes of a row of a log."""
LARGEST_LINE = 64 << 20
"""Bytes of one document in a line."""
DEEPEST = 64
"""Tables in tables."""
LARGEST_INTEGER = 2**63 - 1
"""As TOML says; longer ones are no counts, and cost time to read and to write."""
NO_LONGEST = int(1e30)
"""What transformers writes into tokenizer_config.json as the longest text of a tokenizer that has no longest."""
INFLATED = 200
"""Times its own size that a compressed file may hold, once it holds more than SMALL: text has less than 30."""
SMALL = 4 << 20
"""Bytes that a compressed file may hold whatever its size: rows of a few bytes are still read in seconds."""

PART = r"""(?:"[^"\n]*+"|'[^'\n]*+'|[\w-]++)[ \t]*+\.[ \t]*+"""
DOTTED = re.compile(rf"""(?<![\w'"-])(?:{PART}){{{DEEPEST + 1}}}""")
"""A key of so many parts, which Python's reader takes in the square of the time."""
MARK = "\ufeff"
"""What some editors write before text, to say how it is encoded; it is not seen."""
HALVES = re.compile("[\ud800-\udfff]")
NOT_TEXT = re.compile("[\0\ud800-\udfff]")

Table = dict[str, Any]


class Unreadable(UserError):
    """A file that cannot be what it should be."""

    def __init__(self, path: object, reason: str, instead: str = "name a readable file") -> None:
        super().__init__(f"{path} {reason}; {instead}")
        self.path, self.reason = path, reason


class Missing(Unreadable):
    """There is no such file."""


# Plain files, as bytes and text.

SOURCES: set[tuple[int, int]] = set()
"""Device and number of each file that was opened to be read, by the command that runs."""


def forget_sources() -> None:
    """Another command begins."""
    SOURCES.clear()


def open_plain(path: str | Path, instead: str = "name an existing file") -> BinaryIO:
    """A file to read, which is a file and neither a folder, a FIFO, a socket nor a device."""
    try:
        # Without O_NONBLOCK a FIFO that nobody writes would block here.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(path, "does not exist", instead) from None
    except OSError as problem:
        raise Unreadable(path, f"cannot be read: {problem.strerror}", instead) from None
    except ValueError:
        raise Missing(repr(str(path)), "is no path: it holds a NUL or half a character", instead) from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise Unreadable(path, f"is {kind_of(facts.st_mode)}, not a file", instead)
    SOURCES.add((facts.st_dev, facts.st_ino))
    return os.fdopen(handle, "rb")


@contextmanager
def plain_file(path: str | Path, instead: str = "name an existing file") -> Iterator[BinaryIO]:
    """A plain file that is read in parts: one that a disk does not read, or that has no end, is named."""
    with open_plain(path, instead) as file:
        try:
            yield file
        except OSError as problem:
            raise Unreadable(path, f"cannot be read: {problem.strerror}", instead) from None


def kind_of(mode: int) -> str:
    """What is no plain file, in a word."""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")


def read_bytes(path: str | Path, most: int = LARGEST, instead: str = "name an existing file") -> bytes:
    """All of a file that is not absurdly large."""
    with open_plain(path, instead) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise Unreadable(path, f"has {size:,} bytes, more than the {most:,} such a file may have", instead)
        try:
            return file.read(most)
        except OSError as problem:
            raise Unreadable(path, f"cannot be read: {problem.strerror}", instead) from None


def read_text(path: str | Path, most: int = LARGEST, instead: str = "name a file of text") -> str:
    """All of a UTF-8 file."""
    try:
        return read_bytes(path, most, instead).decode()
    except UnicodeDecodeError as problem:
        raise Unreadable(path, f"is not UTF-8 text at byte {problem.start}", instead) from None


def is_text(text: str, nul: bool = False) -> bool:
    """Whether it has neither NULs, which end a path, unless they may be, nor halves of characters, which no file
    takes."""
    if text.isascii():
        return nul or "\0" not in text
    return not (HALVES if nul else NOT_TEXT).search(text)


# Tables: TOML and JSON.


def parse_toml(text: str) -> Table:
    """A ValueError says what is wrong."""
    if DOTTED.search(text):
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as problem:
        raise ValueError(_without_advice(problem)) from None
    require_sane(table)
    return table


def parse_json(content: str | bytes, finite: bool = True, nul: bool = False) -> Any:
    """A ValueError says what is wrong; `finite`: numbers must be, and text must be text. `nul`: text may hold NULs, as
    tokens and what a model writes do."""
    try:
        value = json.loads(content, parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as problem:
        raise ValueError(_without_advice(problem)) from None
    if finite:
        require_sane(value, finite=True, nul=nul)
    return value


def _without_advice(problem: ValueError) -> str:
    """What Python says of an integer of thousands of digits is advice to programmers."""
    said = str(problem)
    return "an integer has thousands of digits" if "integer string conversion" in said else said


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def require_sane(value: object, finite: bool = False, nul: bool = False) -> None:
    """Depth, integers and text within their bounds; `finite`: floats too. TOML has nan and inf, which fields refuse."""
    _check_scalar(value, finite, nul)
    waiting = [(value, 1)] if isinstance(value, dict | list) else []
    while waiting:
        each, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if isinstance(each, dict):
            for key in each:
                if not is_text(key, nul):
                    raise ValueError(f"the key {key[:40]!r} holds a NUL or half a character")
        for inner in each.values() if isinstance(each, dict) else each:
            if isinstance(inner, dict | list):
                waiting.append((inner, depth + 1))
            else:
                _check_scalar(inner, finite, nul)


def _check_scalar(value: object, finite: bool, nul: bool) -> None:
    if isinstance(value, str):
        if not is_text(value, nul):
            raise ValueError(f"the text {value[:40]!r} holds a NUL or half a character")
    elif isinstance(value, int):
        if abs(value) > LARGEST_INTEGER and value != NO_LONGEST:
            raise ValueError("an integer needs more than 64 bits")
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise ValueError("a number is larger than a float can be")
    elif isinstance(value, date | clock):
        raise ValueError(f"{value} is a date or time, which no setting is")


def read_toml(path: str | Path) -> Table:
    """A TOML file, or a sentence that says where it is broken."""
    instead = "name an existing TOML file"
    text = read_text(path, LARGEST_TOML, instead)
    if text.startswith(MARK):
        raise Unreadable(path, "begins with a byte-order mark, which TOML has not", "save it as UTF-8 without one")
    try:
        return parse_toml(text)
    except ValueError as problem:
        raise Unreadable(path, f"is not TOML: {problem}", "mend it") from None


def read_json(path: str | Path, most: int = LARGEST_TABLE, nul: bool = False) -> Table:
    """A JSON object from a file, or a sentence that says where it is broken."""
    content = read_bytes(path, most, "name an existing JSON file")
    try:
        value = parse_json(content, nul=nul)
    except ValueError as problem:
        raise Unreadable(path, f"is not JSON: {problem}", "mend it") from None
    if not isinstance(value, dict):
        raise Unreadable(path, "does not hold a JSON object", "write it as {...}")
    return value


# Logs: a JSON object a line. Who writes one may be killed in the middle of its last row.


def read_rows(path: str | Path, needs: Callable[[Table], bool] = lambda row: True) -> list[Table]:
    """The rows of a log, none if there is no such file. The last line may be a part of a row, and is none then; one
    before it that is no row means that the file is damaged. `needs`: what a row must have."""
    try:
        with plain_file(path, "remove it, or copy it again") as file:
            return _rows(path, iter(partial(file.readline, LARGEST_ROW + 1), b""), needs)
    except Missing:
        return []


def parse_rows(path: str | Path, content: bytes, needs: Callable[[Table], bool] = lambda row: True) -> list[Table]:
    """As `read_rows`, of what was read."""
    return _rows(path, iter(content.splitlines(keepends=True)), needs)


def _rows(path: str | Path, lines: Iterator[bytes], needs: Callable[[Table], bool]) -> list[Table]:
    rows: list[Table] = []
    none = 0
    for number, line in enumerate(lines, 1):
        if none or len(line) > LARGEST_ROW:
            reason = f"is damaged: its line {none or number} is no row"
            raise Unreadable(path, reason, "remove that line, or copy the file again")
        try:
            row = parse_json(line, nul=True) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if isinstance(row, dict) and needs(row):
            rows.append(row)
        else:
            none = number
    return rows


# Compressed files, and lines of any file.


class Inflated(io.RawIOBase):
    """The bytes inside a .gz or .zst file of any number of members. A file that is cut short is an EOFError: a reader
    that ends quietly there would lose documents without a word. One that grows beyond measure is refused."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._raw, self._path = raw, path
        self._begin = _zstd(path) if path.suffix == ".zst" else _gzip
        # Bytes taken at a time: gzip makes at most a thousand of one, zstd thirty times as many.
        self._block = 1 << 11 if path.suffix == ".zst" else 1 << 14
        self._member: Any = None
        self._packed = b""
        self._ready = memoryview(b"")
        self._taken = self._given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._packed or self._raw.read(self._block)
            if not block:
                if self._member is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._taken += 0 if self._packed else len(block)
            self._member = self._member or self._begin()
            self._ready, self._packed = memoryview(self._member.decompress(block)), b""
            if self._member.eof:
                self._packed, self._member = self._member.unused_data.lstrip(b"\0"), None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        self._given += count
        # Of what was read so far, not of the whole file: one of many megabytes would be read for minutes.
        if self._given > max(SMALL, INFLATED * self._taken):
            reason = f"holds more than {INFLATED} times as many bytes as its first {self._taken:,} are"
            raise Unreadable(self._path, reason, "decompress it yourself if it is what it should be")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _gzip() -> Any:
    import zlib

    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _zstd(path: Path) -> Callable[[], Any]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path} needs a package that is not installed; pip install zstandard") from None
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj


def open_inflated(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """The file itself, whose position tells the progress, and the stream of its decompressed bytes."""
    raw = open_plain(path)
    if path.suffix in (".gz", ".zst"):
        return raw, io.BufferedReader(Inflated(raw, path), 1 << 20)
    return raw, raw


def read_line(stream: BinaryIO, path: Path, number: int) -> bytes:
    """The next line, empty at the end."""
    line = stream.readline(LARGEST_LINE + 1)
    if len(line) > LARGEST_LINE:
        reason = f"line {number + 1} has more than the {LARGEST_LINE:,} bytes a line may have"
        raise Unreadable(path, reason, "split it, or write one document per line")
    return line


# Tensors and columns.

LARGEST_HEADER = 1 << 25
"""Bytes: of three hundred thousand tensors. The format allows three times as many, and their reading takes long."""


def open_safetensors(path: str | Path) -> Any:
    """`safe_open`, of a plain file whose header is there and can be one."""
    from safetensors import SafetensorError, safe_open

    read_safetensors_header(path)
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as problem:
        raise Unreadable(path, f"is damaged: {problem}", COPY_AGAIN) from None


COPY_AGAIN = "copy the model again"


def read_safetensors_header(path: str | Path) -> Table:
    """What a plain file says of its tensors, by their names."""
    instead = COPY_AGAIN
    with open_plain(path, instead) as file:
        try:
            size, begin = os.fstat(file.fileno()).st_size, file.read(8)
            header = int.from_bytes(begin, "little")
            whole = len(begin) == 8 and header <= size - 8
            if whole and header > LARGEST_HEADER:
                reason = f"begins with a header of {header:,} bytes, more than the {LARGEST_HEADER:,} it may have"
                raise Unreadable(path, reason, "write its tensors into several files")
            text = file.read(header) if whole else b""
        except OSError as problem:
            raise Unreadable(path, f"cannot be read: {problem.strerror}", instead) from None
        if not whole:
            raise Unreadable(path, f"is damaged: its {size:,} bytes do not hold the header they begin with", instead)
        try:
            found = parse_json(text.rstrip(b" "))
        except (ValueError, UnicodeDecodeError) as problem:
            raise Unreadable(path, f"is damaged: its header is not JSON ({problem})", instead) from None
    return found if isinstance(found, dict) else {}


def open_parquet(path: Path) -> Any:
    """A ParquetFile whose columns, decompressed, are not beyond measure."""
    import pyarrow.parquet as parquet

    open_plain(path).close()
    table = parquet.ParquetFile(path, memory_map=True)
    facts = table.metadata
    size = path.stat().st_size
    for group in range(facts.num_row_groups):
        held = facts.row_group(group).total_byte_size
        if held > max(LARGEST, INFLATED * size) or held < 0:
            raise Unreadable(path, f"says that a row group holds {held:,} bytes, of {size:,} in all", "write it again")
    return table


def open_arrow(path: Path) -> Any:
    """A file of Arrow, mapped."""
    import pyarrow

    open_plain(path).close()
    return pyarrow.memory_map(str(path))


def map_array(path: Path, dtype: Any) -> Any:
    """A plain file as a numpy array that is read where it is looked at."""
    import numpy as np

    open_plain(path).close()
    return np.memmap(path, mode="r", dtype=dtype)


def checked_batches(batches: Iterator[Any], path: Path) -> Iterator[Any]:
    """Batches of Arrow whose offsets and text were looked at: what a file says of them may lead anywhere. Rows without
    content, and words of a dictionary, take no bytes there and do here."""
    most = max(LARGEST_LINE, INFLATED * path.stat().st_size)
    held = 0
    for batch in batches:
        batch.validate(full=True)
        held += batch.nbytes + 8 * batch.num_rows + sum(map(_words, batch.columns))
        if held > most:
            raise Unreadable(path, f"holds more than {most:,} bytes, far beyond its own size", "write it again")
        yield batch


def _words(column: Any) -> int:
    """Bytes of a column that has numbers of words in place of the words."""
    import pyarrow
    import pyarrow.compute as compute

    if not pyarrow.types.is_dictionary(column.type) or not pyarrow.types.is_string(column.type.value_type):
        return 0
    lengths = compute.binary_length(column.dictionary).cast("int64")
    return int(compute.sum(lengths.take(column.indices)).as_py() or 0)


def is_finite(value: object) -> bool:
    """Whether it is a number, and one to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
