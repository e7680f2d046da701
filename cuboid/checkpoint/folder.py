"""The checkpoints of a run: which there are, which is the newest whole one, which may go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from cuboid.checkpoint.manifest import Manifest, verify
from cuboid.errors import UserError

NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_whole(folder: Path) -> tuple[Path | None, Manifest | None, list[str]]:
    """The newest checkpoint that verifies, and the sentences about newer ones that do not."""
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, verify(path), damaged
        except UserError as error:
            damaged.append(str(error))
    return None, None, damaged


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep`; never the newest one that verifies."""
    newest, _, _ = newest_whole(folder)
    removed = [path for path in checkpoints(folder)[:-keep] if path != newest]
    for path in removed:
        # Renamed first, so that a half-removed one is never taken for a checkpoint.
        aside = path.with_name(f".{path.name}.removing")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside)
    return removed
