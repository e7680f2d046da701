"""Checksums of a checkpoint's files: XXH3, 128 bits. They find damage, and cost a tenth of what writing costs; a
checkpoint made to deceive is met by never running anything of it, not by its checksums."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from cuboid.checkpoint.location import Location

NAME = "xxh3_128"

Watch = Callable[[int], None]
"""Is told of bytes as they are read."""


def checksum_of_bytes(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128(content).hexdigest()


def checksum_of_file(place: Location, size: int, watch: Watch | None = None) -> str:
    digest = xxhash.xxh3_128()
    place.files.prefetch(place.path)
    buffer = memoryview(bytearray(min(place.files.read_size, size)))
    for position in range(0, size, place.files.read_size):
        part = buffer[: size - position]
        place.files.read_into(place.path, position, part)
        digest.update(part)
        if watch is not None:
            watch(part.nbytes)
    return digest.hexdigest()
