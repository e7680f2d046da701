"""Whether a checkpoint is what it says: every file, and nothing else, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

from cuboid.checkpoint.checksum import Watch, checksum_of_file, kind_of
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import (
    MANIFEST,
    STEP_FOLDER,
    Damage,
    Manifest,
    Place,
    StoredFile,
    read_manifest,
    require_plain,
)

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
