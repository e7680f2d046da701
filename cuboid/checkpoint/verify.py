"""Whether a checkpoint is what it says: every file, and nothing else, byte by byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import (
    COUNTS,
    DATA_FILE,
    INDEX,
    MANIFEST,
    STEP_FOLDER,
    Damage,
    Manifest,
    Place,
    StoredFile,
    Watch,
    checksum_of_file,
    kind_of,
    read_json,
    read_manifest,
    require_plain,
)

# The index of a checkpoint: where each chunk of each full tensor lies, believed only after every number is checked.


BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "uint8": 1}
"""Of an element, by the name of its type."""
MOST_DIMENSIONS = 8


def check_index(place: Place, files: Mapping[str, StoredFile] | None = None) -> dict[str, Any]:
    """The index, if every tensor is made of its chunks without gap or overlap, and every chunk lies in its file alone.

    Nothing else decides what is read, so nothing can be allocated that the files do not hold. `files`: what they are
    known to be, where not all of them are here."""
    return check_entries(place, read_json(locate(place), INDEX)[1], files)


def check_entries(place: Place, index: dict[str, Any], files: Mapping[str, StoredFile] | None = None) -> dict[str, Any]:
    """The same of an index that is read already."""
    folder = locate(place)
    used: dict[str, list[tuple[int, int]]] = {}
    for name, entry in index.items():
        try:
            _check_tensor(entry, used)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise Damage(folder, INDEX, f"is wrong about {name[:200]!r} ({reason})") from None
    for file, places in used.items():
        if any(end > start for (_, end), (start, _) in pairwise(sorted(places))):
            raise Damage(folder, INDEX, f"gives the same bytes of {file} to two chunks")
        if files is not None and file not in files:
            raise Damage(folder, INDEX, f"names {file}, which is none of its files")
        size = require_plain(folder, file) if files is None else files[file].bytes
        if max(end for _, end in places) > size:
            raise Damage(folder, INDEX, f"has chunks that lie outside {file}")
    return index


def require_state(place: Place, kinds: Sequence[str]) -> None:
    """A `Damage` if the index does not have each of these kinds of every parameter, in the parameter's shape. What else
    is wrong with it, the ranks find: they may take an older checkpoint."""
    folder = locate(place)
    try:
        index = read_json(folder, INDEX)[1]
    except Damage:
        return
    shapes: dict[str, dict[str, object]] = {}
    for title, entry in index.items():
        kind, _, name = title.partition("/")
        shapes.setdefault(kind, {})[name] = entry.get("shape") if isinstance(entry, dict) else None
    held = [shapes.get(kind, {}) for kind in kinds]
    for name in sorted(set().union(*held)):
        for kind, each in zip(kinds, held, strict=True):
            if name not in each:
                raise Damage(folder, INDEX, f"lacks {kind}/{name}")
            if each[name] != held[0].get(name):
                raise Damage(folder, INDEX, f"has another shape for {kind}/{name} than for the parameter")


def _check_tensor(entry: dict[str, Any], used: dict[str, list[tuple[int, int]]]) -> None:
    size = BYTES.get(entry["dtype"])
    if size is None:
        raise ValueError(f"dtype {entry['dtype']!r} is unknown")
    shape = _counts(entry["shape"], low=1)
    if not 1 <= len(shape) <= MOST_DIMENSIONS:
        raise ValueError(f"it has {len(shape)} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for chunk in entry["chunks"]:
        offsets, lengths = _counts(chunk["offsets"], low=0), _counts(chunk["lengths"], low=1)
        if not len(offsets) == len(lengths) == len(shape):
            raise ValueError("a chunk has other dimensions than its tensor")
        if any(offset + length > limit for offset, length, limit in zip(offsets, lengths, shape, strict=True)):
            raise ValueError("a chunk lies outside its tensor")
        position, held = _counts([chunk["position"], chunk["bytes"]], low=0)
        if held != prod(lengths) * size:
            raise ValueError(f"a chunk of {lengths} has {held} bytes")
        if not DATA_FILE.fullmatch(chunk["file"]):
            raise ValueError(f"{chunk['file']!r} is no file of a checkpoint")
        used.setdefault(chunk["file"], []).append((position, position + held))
        _add_corners(corners, offsets, lengths, 1)
    _add_corners(corners, (0,) * len(shape), shape, -1)
    if any(corners.values()):
        raise ValueError("its chunks do not make the whole tensor, each element once")


def _add_corners(
    corners: Counter[tuple[int, ...]], offsets: tuple[int, ...], lengths: tuple[int, ...], by: int
) -> None:
    """Chunks make a whole without gap or overlap exactly when their corners, signed by how many of a corner's
    coordinates are ends, cancel out all but the corners of the whole: a sum of chunks is determined by them."""
    ends = ((offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
    for corner in product(*([(start, 1), (end, -1)] for start, end in ends)):
        corners[tuple(place for place, _ in corner)] += by * prod(sign for _, sign in corner)


def _counts(values: object, low: int) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
        type(value) is not int or value < low or value not in COUNTS for value in values
    ):
        raise ValueError(f"{str(values)[:80]} are no sizes")
    return tuple(values)


MISMATCH = "does not match its checksum"


def verify(place: Place, contents: bool = True, watch: Watch | None = None) -> Manifest:
    """The manifest if every file is as it says; else a `Damage` names the first that is not, and why.

    Without `contents` only names and sizes are compared."""
    for damage in damages(place, contents, watch):
        raise damage
    return read_manifest(place)


def damages(place: Place, contents: bool = True, watch: Watch | None = None) -> Iterator[Damage]:
    """Every file that is not what the manifest says."""
    folder = locate(place)
    try:
        manifest = read_manifest(folder)
        present = folder.names()
    except Damage as damage:
        yield damage
        return
    except OSError as error:
        yield Damage(folder, MANIFEST, f"cannot be read ({error})")
        return
    if (match := STEP_FOLDER.fullmatch(folder.name)) and int(match[1]) != manifest.step:
        yield Damage(folder, MANIFEST, f"is of step {manifest.step}")
    known = {*manifest.files, MANIFEST}
    # What nobody listed was put there by somebody else, and what reads it elsewhere may run it.
    yield from (Damage(folder, name, "is not one of its files") for name in present if name not in known)
    whole = True
    for name, expected in manifest.files.items():
        try:
            check_file(folder, name, expected, contents, watch)
        except Damage as damage:
            whole = False
            yield damage
    if whole and contents:
        try:
            check_index(folder)
        except Damage as damage:
            yield damage


def check_file(
    folder: Location, name: str, expected: StoredFile, contents: bool = True, watch: Watch | None = None
) -> None:
    try:
        size = require_plain(folder, name)
        if size != expected.bytes:
            raise Damage(folder, name, f"has {size:,} bytes, not {expected.bytes:,}")
        if contents and checksum_of_file(folder / name, size, kind_of(expected.checksum), watch) != expected.checksum:
            raise Damage(folder, name, MISMATCH)
    except OSError as error:  # a disk that fails is damage too: an older checkpoint may lie on good ground
        raise Damage(folder, name, f"cannot be read ({error})") from None
