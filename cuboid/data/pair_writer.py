"""Writes Megatron pairs: one from documents, or one from many pairs put one after another."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cuboid.data.indexed import HEADER, MAGIC, TYPES, VERSION, IndexedTokens, Tokens, open_pair, pair_paths

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
            with pair_paths(part)[0].open("rb") as source:
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
            raw = pair_paths(part)[1].read_bytes()
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
