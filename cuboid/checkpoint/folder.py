"""The checkpoints of a run: which there are, which is the newest whole one, which may go."""

from __future__ import annotations

import re

from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import MANIFEST, Manifest, Place, verify
from cuboid.errors import UserError

NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(folder: Place, step: int) -> Location:
    return locate(folder) / f"step-{step:08d}"


def step_of(checkpoint: Location) -> int:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def checkpoints(folder: Place) -> list[Location]:
    """Published checkpoints, oldest first."""
    place = locate(folder)
    found = [place / name for name in place.names() if NAME.fullmatch(name)]
    if not place.files.renames:  # without a manifest it is not published yet
        found = [path for path in found if (path / MANIFEST).exists]
    return sorted(found, key=step_of)


def newest_whole(folder: Place, contents: bool = True) -> tuple[Location | None, Manifest | None, list[str]]:
    """The newest checkpoint that verifies, and the sentences about newer ones that do not."""
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, verify(path, contents), damaged
        except UserError as error:
            damaged.append(str(error))
    return None, None, damaged


def prune(folder: Place, keep: int) -> list[Location]:
    """Remove all but the newest `keep`; never the newest one that verifies."""
    newest, _, _ = newest_whole(folder)
    removed = [path for path in checkpoints(folder)[:-keep] if path != newest]
    for path in removed:
        withdraw(path)
    return removed


def withdraw(checkpoint: Location) -> None:
    """Remove a checkpoint such that one half removed is never taken for a checkpoint."""
    if checkpoint.files.renames:
        aside = checkpoint.parent / f".{checkpoint.name}.removing"
        aside.remove()
        checkpoint.rename(aside)
        checkpoint = aside
    checkpoint.remove(first=MANIFEST)
