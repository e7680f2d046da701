"""The checkpoints of a run: which there are, which is the newest whole one, which may go."""

from __future__ import annotations

import re
from contextlib import suppress

from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import (
    DATA_FILE,
    INDEX,
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    Place,
    Watch,
    read_manifest,
)
from cuboid.checkpoint.verify import check_file, verify
from cuboid.errors import UserError

LEFT_OVER = re.compile(r"\.step-[0-9]{8,18}\.(writing|removing)")


def checkpoint_path(folder: Place, step: int) -> Location:
    return locate(folder) / f"step-{step:08d}"


def step_of(checkpoint: Location) -> int:
    match = STEP_FOLDER.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def checkpoints(folder: Place) -> list[Location]:
    """Published checkpoints, oldest first."""
    place = locate(folder)
    found = [place / name for name in place.names() if STEP_FOLDER.fullmatch(name)]
    if not place.files.renames:  # without a manifest it is not published yet
        found = [path for path in found if (path / MANIFEST).exists]
    return sorted(found, key=step_of)


def newest_whole(
    folder: Place, contents: bool = True, watch: Watch | None = None
) -> tuple[Location | None, Manifest | None, list[str]]:
    """The newest checkpoint that verifies, and the sentences about newer ones that do not."""
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, verify(path, contents, watch), damaged
        except UserError as error:
            damaged.append(str(error))
    return None, None, damaged


def require_checkpoints(folder: Place) -> None:
    """Refuse a folder where others keep something under the names of checkpoints: old ones are removed, and all that is
    in them."""
    place = locate(folder)
    for name in place.names():
        if STEP_FOLDER.fullmatch(name) or LEFT_OVER.fullmatch(name):
            for inner in (place / name).names():
                hidden = inner.startswith(".")  # a network file system has such names for files that are removed
                if not hidden and inner not in (MANIFEST, INDEX) and not DATA_FILE.fullmatch(inner):
                    raise UserError(
                        f"{place} has {name}/{inner}, which is of no checkpoint, and old checkpoints are removed with "
                        "all they hold; use another folder of checkpoints"
                    )


def superfluous(
    folder: Place, keep: int, keep_every: int = 0, newest: Location | None = None, watch: Watch | None = None
) -> list[Location]:
    """All but the newest `keep` and each `keep_every`-th step; never the newest one that verifies, which is found by
    reading unless it is named."""
    older = [path for path in checkpoints(folder)[:-keep] if not keep_every or step_of(path) % keep_every]
    if older and newest is None:
        newest = newest_whole(folder, watch=watch)[0]
    return [path for path in older if path != newest]


def prune(folder: Place, keep: int, keep_every: int = 0, newest: Location | None = None) -> list[Location]:
    removed = superfluous(folder, keep, keep_every, newest)
    for path in removed:
        withdraw(path)
    return removed


def sweep(folder: Place) -> None:
    """Remove what a run that was killed left half-written or half-removed; only while no run writes here."""
    place = locate(folder)
    for name in place.names():
        if LEFT_OVER.fullmatch(name):
            (place / name).remove()


def clear(folder: Place) -> None:
    """Remove all checkpoints and what was left aside, and nothing else."""
    place = locate(folder)
    for name in place.names():
        if STEP_FOLDER.fullmatch(name):
            withdraw(place / name)
    sweep(place)
    if place.exists and not place.names():
        place.remove()


def withdraw(checkpoint: Location) -> None:
    """Remove a checkpoint such that one half removed is never taken for a checkpoint."""
    if checkpoint.files.renames:
        aside = checkpoint.parent / f".{checkpoint.name}.removing"
        aside.remove()
        checkpoint.rename(aside)
        checkpoint = aside
    checkpoint.remove(first=MANIFEST)


# Copy a checkpoint to another folder or store: written aside, read back, then published; never over another.


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
