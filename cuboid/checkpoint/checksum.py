"""Checksums of a checkpoint's files, spelled `kind:digits`. They find damage, and cost a tenth of what writing costs;
a checkpoint made to deceive is met by never running anything of it, not by its checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Protocol

from cuboid.checkpoint.location import Location
from cuboid.errors import UserError

FAST, PLAIN = "xxh3_128", "blake2b_128"
"""XXH3 where its package is installed; what comes with Python elsewhere."""

Watch = Callable[[int], None]
"""Is told of bytes as they are read."""


class Digest(Protocol):
    def update(self, content: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


@cache
def kind_here() -> str:
    return FAST if find_spec("xxhash") else PLAIN


def kind_of(checksum: str) -> str:
    return checksum.partition(":")[0]


def new_digest(kind: str) -> Digest:
    if kind == PLAIN:
        return partial(hashlib.blake2b, digest_size=16)()
    try:
        import xxhash
    except ImportError:
        raise UserError("this checkpoint's checksums are xxh3_128, which needs a package; pip install xxhash") from None
    return xxhash.xxh3_128()


def spell(kind: str, digest: Digest) -> str:
    return f"{kind}:{digest.hexdigest()}"


def checksum_of_bytes(content: bytes | memoryview, kind: str = "") -> str:
    kind = kind or kind_here()
    digest = new_digest(kind)
    digest.update(content)
    return spell(kind, digest)


def checksum_of_file(place: Location, size: int, kind: str, watch: Watch | None = None) -> str:
    digest = new_digest(kind)
    place.files.prefetch(place.path)
    buffer = memoryview(bytearray(min(place.files.read_size, size)))
    for position in range(0, size, place.files.read_size):
        part = buffer[: size - position]
        place.files.read_into(place.path, position, part)
        digest.update(part)
        if watch is not None:
            watch(part.nbytes)
    return spell(kind, digest)
