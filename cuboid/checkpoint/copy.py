"""Copy a checkpoint to another folder or store: written aside, read back, then published; never over another."""

from __future__ import annotations

from contextlib import suppress

from cuboid.checkpoint.checksum import Watch
from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import MANIFEST, STEP_FOLDER, Manifest, Place, read_manifest
from cuboid.checkpoint.verify import check_file, verify
from cuboid.errors import UserError


def copy(source: Location, folder: Place, watch: Watch | None = None) -> Location:
    """Into a folder of checkpoints, or to exactly the name of a checkpoint; returns where it is. Each byte is read
    three times: the source is verified before anything is written, and what was written before it is published."""
    manifest = verify(source, watch=watch)
    place = locate(folder)
    target = place if STEP_FOLDER.fullmatch(place.name) else checkpoint_path(place, manifest.step)
    if target.exists or target.names():
        raise UserError(f"{target} is there already; use another folder, or remove it first")
    if STEP_FOLDER.fullmatch(target.name) and target != checkpoint_path(target.parent, manifest.step):
        raise UserError(f"{target} is no name for step {manifest.step}; use {target.parent}")
    aside = target.parent / f".{target.name}.writing" if target.files.renames else target
    try:
        _write(source, aside, manifest, watch)
        if aside != target:
            aside.files.fsync_folder(aside.path)
            aside.rename(target)
            target.files.fsync_folder(target.parent.path)
    except OSError as error:
        _give_up(aside)
        raise UserError(f"{target} cannot be written: {error.strerror or error}; use another folder") from None
    except BaseException:
        _give_up(aside)
        raise
    return target


def _write(source: Location, aside: Location, manifest: Manifest, watch: Watch | None) -> None:
    aside.remove(first=MANIFEST)
    aside.make_folder()
    for name, facts in manifest.files.items():
        _copy_file(source / name, aside / name, facts.bytes, watch)
    for name, facts in manifest.files.items():
        check_file(aside, name, facts, watch=watch)
    (aside / MANIFEST).write_durably((source / MANIFEST).read())  # last: what has none is no checkpoint
    read_manifest(aside)


def _copy_file(source: Location, target: Location, size: int, watch: Watch | None) -> None:
    handle = target.files.open(target.path)
    try:
        step = source.files.read_size
        buffer = memoryview(bytearray(min(step, size)))
        for position in range(0, size, step):
            part = buffer[: size - position]
            source.files.read_into(source.path, position, part)
            target.files.write(handle, part)
            if watch is not None:
                watch(part.nbytes)
        target.files.fsync(handle)
    finally:
        target.files.close(handle)


def _give_up(aside: Location) -> None:
    with suppress(OSError):  # the same disk, most likely; what is aside is never taken for a checkpoint
        aside.remove(first=MANIFEST)
