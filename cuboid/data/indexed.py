"""Tokens of documents in a Megatron pair: `PREFIX.bin` holds all tokens, `PREFIX.idx` where each sequence and document
begins.

    PREFIX.idx   magic, version, type of a token, sequences, documents + 1;
                 tokens of each sequence (int32), its first byte in .bin (int64),
                 first sequence of each document (int64)

Pairs are mapped, never read whole; nothing in them is executed, and every count is checked against the size of the file
that must hold it before anything is mapped.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cuboid.errors import UserError
from cuboid.readers import map_array, open_plain, plain_file, read_bytes

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Megatron's numbers for types of tokens; 6 and 7 are floating point, which tokens are not."""
SCAN = 1 << 20
"""How many entries a full check looks at together."""

Tokens = NDArray[Any]


@dataclass(frozen=True)
class MappedFile:
    path: Path
    file: tuple[int, int]
    """Its device and number: another of the same name may take its place, and does no harm to what is mapped."""
    size: int

    @classmethod
    def of(cls, path: Path) -> MappedFile:
        facts = path.stat()
        return cls(path, (facts.st_dev, facts.st_ino), facts.st_size)


@dataclass(frozen=True)
class IndexedTokens:
    """All tokens one after another, and where sequences and documents begin."""

    name: str
    """What the user calls it, for errors."""
    tokens: Tokens
    pointers: NDArray[np.int64]
    """First byte of each sequence."""
    document_index: NDArray[np.int64]
    """First sequence of each document, and the number of sequences at the end."""
    mapped: tuple[MappedFile, ...] = ()

    @property
    def documents(self) -> int:
        return len(self.document_index) - 1

    @property
    def sequences(self) -> int:
        return len(self.pointers)

    def sequence_start(self, sequence: int) -> int:
        """Its first token; for the number of sequences: the number of tokens."""
        if sequence >= len(self.pointers):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.tokens.itemsize

    def document_start(self, document: int) -> int:
        """Its first token; for the number of documents: the number of tokens."""
        return self.sequence_start(int(self.document_index[document]))

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Tokens of first..last-1 that begin a document."""
        return _between(self.document_start, self.documents, first, last)[1]

    def sequence_starts(self, first: int, last: int) -> tuple[int, NDArray[np.int64]]:
        """Which sequence is the first to begin in first..last-1, and where it and its followers there begin."""
        return _between(self.sequence_start, self.sequences, first, last)

    def check_whole(self) -> None:
        """Refuse files that became shorter since they were mapped: the system ends who reads beyond their end."""
        for mapped in self.mapped:
            with suppress(OSError):  # one that was removed is there for as long as it is mapped
                facts = mapped.path.stat()
                if (facts.st_dev, facts.st_ino) == mapped.file and facts.st_size < mapped.size:
                    raise damaged(mapped.path, f"it has {facts.st_size:,} bytes, not {mapped.size:,}")

    def document(self, index: int) -> Tokens:
        return self.tokens[self.document_start(index) : self.document_start(index + 1)]


def _between(start: Callable[[int], int], count: int, first: int, last: int) -> tuple[int, NDArray[np.int64]]:
    # A binary search that touches a few pages of the file; numpy's own would copy all of it, because the arrays of an
    # index are not aligned.
    low = bisect_left(range(count), first, key=start)
    high = bisect_left(range(count), last, lo=low, key=start)
    return low, np.array([start(index) for index in range(low, high)], dtype=np.int64)


def pair_paths(prefix: str | Path) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx; the name of either file stands for the prefix."""
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(f"{text}.bin"), Path(f"{text}.idx")


def open_pair(prefix: str | Path) -> IndexedTokens:
    """Maps a pair. Sizes are checked, contents are not: see `check_pair`."""
    tokens_path, index_path = pair_paths(prefix)
    for path in (tokens_path, index_path):
        if not path.is_file():
            raise UserError(f"{path} is missing; a Megatron pair is {tokens_path.name} beside {index_path.name}")
    size = index_path.stat().st_size
    with plain_file(index_path) as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise damaged(index_path, "it does not begin like a Megatron index")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise damaged(index_path, f"its version is {version}, not {VERSION}")
    if code not in TYPES:
        raise damaged(index_path, f"{code} is not the number of a type of tokens")
    least = HEADER.size + 12 * sequences + 8 * entries
    # Megatron appends one byte per sequence when sequences have modes.
    if size not in (least, least + sequences):
        raise damaged(
            index_path, f"its {sequences:,} sequences and {entries:,} documents need {least:,} bytes, not {size:,}"
        )
    bytes_held, width = tokens_path.stat().st_size, np.dtype(TYPES[code]).itemsize
    if entries < 2 or sequences < 1 or bytes_held < width:
        raise damaged(index_path, "it holds no document")
    if bytes_held % width:
        raise damaged(tokens_path, f"its {bytes_held:,} bytes are not a whole number of {width}-byte tokens")
    mapped = (MappedFile.of(tokens_path), MappedFile.of(index_path))
    raw = map_array(index_path, np.uint8)
    sizes = raw[HEADER.size : HEADER.size + 4 * sequences].view("<i4")
    pointers = raw[HEADER.size + 4 * sequences : HEADER.size + 12 * sequences].view("<i8")
    document_index = raw[HEADER.size + 12 * sequences : least].view("<i8")
    if int(pointers[-1]) + int(sizes[-1]) * width != bytes_held or int(pointers[0]) != 0:
        raise damaged(tokens_path, f"its {bytes_held:,} bytes are not what {index_path.name} describes")
    if int(document_index[0]) != 0 or int(document_index[-1]) != sequences:
        raise damaged(index_path, "its documents do not cover its sequences")
    tokens = map_array(tokens_path, np.dtype(TYPES[code]).newbyteorder("<"))
    return IndexedTokens(str(prefix), tokens, pointers, document_index, mapped)


def check_pair(prefix: str | Path) -> None:
    """Reads the whole index: every sequence must begin where the one before it ends, every document likewise."""
    pair = open_pair(prefix)
    _, index_path = pair_paths(prefix)
    raw = map_array(index_path, np.uint8)
    sizes = raw[HEADER.size : HEADER.size + 4 * pair.sequences].view("<i4")
    expected = 0
    for start in range(0, pair.sequences, SCAN):
        some = sizes[start : start + SCAN].astype(np.int64)
        ends = expected + np.cumsum(some) * pair.tokens.itemsize
        begins = np.concatenate(([expected], ends[:-1]))
        if (some < 0).any() or not np.array_equal(begins, pair.pointers[start : start + SCAN]):
            raise damaged(index_path, "its sequences do not follow one another")
        expected = int(ends[-1])
    for start in range(0, pair.documents, SCAN):
        if (np.diff(pair.document_index[start : start + SCAN + 1]) < 0).any():
            raise damaged(index_path, "its documents do not follow one another")


def largest_token(pair: IndexedTokens, limit: int) -> int:
    """The largest of the first `limit` tokens."""
    parts = (pair.tokens[start : min(start + SCAN, limit)] for start in range(0, min(limit, len(pair.tokens)), SCAN))
    return max(int(part.max()) for part in parts)


def damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; build or copy it again")


def in_memory(name: str, documents: Iterator[Tokens]) -> IndexedTokens:
    """Documents of one sequence each, held in memory."""
    arrays = list(documents)
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    tokens = np.concatenate(arrays)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)[:-1]))
    return IndexedTokens(name, tokens, starts * tokens.itemsize, np.arange(len(arrays) + 1, dtype=np.int64))


# Writes Megatron pairs: one from documents, or one from many pairs put one after another.


LONGEST = (1 << 31) - 1
"""An index counts the tokens of a sequence in 31 bits; a longer document becomes several sequences."""
COPY = 1 << 24
"""Bytes copied together."""

CODES = {np.dtype(kind): code for code, kind in TYPES.items()}


class HashingFile:
    """A file being written, and the size and checksum of what was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()


def token_type(vocabulary: int) -> np.dtype[np.generic]:
    """The smallest type Megatron knows for such tokens."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)


def write_pair(prefix: str | Path, documents: Iterable[Sequence[Tokens]], dtype: np.dtype[np.generic]) -> IndexedTokens:
    """Each document is a list of sequences. Returns the pair, opened."""
    tokens_path, index_path = pair_paths(prefix)
    sizes, document_index = array("i"), array("q", [0])
    with tokens_path.open("wb") as file:
        for document in documents:
            for tokens in document:
                file.write(tokens.astype(dtype.newbyteorder("<"), copy=False).tobytes())
                sizes.extend(len(tokens[start : start + LONGEST]) for start in range(0, max(len(tokens), 1), LONGEST))
            document_index.append(len(sizes))
    counted = np.frombuffer(sizes, dtype=np.int32) if sizes else np.zeros(0, np.int32)
    starts = (np.cumsum(counted, dtype=np.int64) - counted) * dtype.itemsize
    with index_path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(sizes), len(document_index)))
        file.write(counted.astype("<i4").tobytes() + starts.astype("<i8").tobytes())
        file.write(np.frombuffer(document_index, dtype=np.int64).astype("<i8").tobytes())
    return open_pair(prefix)


def merge_pairs(parts: Sequence[Path], prefix: Path) -> dict[str, HashingFile]:
    """One pair that holds the documents of all parts in their order; memory is bounded by the largest part.

    Returns size and checksum of the two files by name."""
    tokens_path, index_path = pair_paths(prefix)
    with tokens_path.open("wb") as file:
        tokens = HashingFile(file)
        for part in parts:
            with open_plain(pair_paths(part)[0]) as source:
                while block := source.read(COPY):
                    tokens.write(block)
    counts = [
        (pair.sequences, pair.documents, len(pair.tokens) * pair.tokens.itemsize) for pair in map(open_pair, parts)
    ]
    sequences, documents = sum(count[0] for count in counts), sum(count[1] for count in counts)
    with index_path.open("wb") as file:
        index = HashingFile(file)
        code = CODES[np.dtype(open_pair(parts[0]).tokens.dtype.type)]
        index.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for part, (count, _, _) in zip(parts, counts, strict=True):
            raw = read_bytes(pair_paths(part)[1])
            index.write(raw[HEADER.size : HEADER.size + 4 * count])
        shift = 0
        for part, (_, _, size) in zip(parts, counts, strict=True):
            index.write((open_pair(part).pointers + shift).tobytes())
            shift += size
        shift = 0
        for part, (count, _, _) in zip(parts, counts, strict=True):
            index.write((open_pair(part).document_index[:-1] + shift).tobytes())
            shift += count
        index.write(np.array([sequences], dtype="<i8").tobytes())
    return {tokens_path.name: tokens, index_path.name: index}
