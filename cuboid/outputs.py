"""The files and folders that commands write, checked before the work whose result they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cuboid.errors import UserError
from cuboid.readers import SOURCES

CHECKPOINT, MANIFEST = re.compile(r"step-[0-9]{8,18}"), "manifest.json"
"""The name of a folder that is a checkpoint, once this file is in it."""


def check_way(named: str, path: str | Path) -> None:
    """`new/../kept` is no folder before `new` is there, and `kept` after: what is in it would be missed now. No way
    leads into a checkpoint. `named`: what the user wrote before the path, such as `output.folder=`."""
    parts = Path(path).parts
    for place in (index for index, part in enumerate(parts) if part == ".."):
        if not (before := Path(*parts[:place])).is_dir():
            works = os.path.realpath(path) if Path(path).is_absolute() else os.path.relpath(os.path.realpath(path))
            raise UserError(f"{named}{path} goes through {before}, which is no folder; use {named}{works}")
    keep_checkpoints(named, path)


def keep_checkpoints(named: str, path: str | Path) -> None:
    """Refuse what would be written into a checkpoint, or over a file of it: it would be damaged."""
    try:
        place = Path(os.path.realpath(path))
    except ValueError:  # no path at all, as whoever opens it says
        return
    for folder in (place, *place.parents):
        if CHECKPOINT.fullmatch(folder.name) and os.path.isfile(folder / MANIFEST):
            where = "is" if folder == place else "is inside"
            raise UserError(f"{named}{path} {where} the checkpoint {folder}, which stays as it is; use another place")


def check_output(output: Path) -> None:
    """Refuse what `write_output` would refuse, before the work whose result it is; nothing is left behind."""
    from tempfile import TemporaryFile

    with _refused(output):
        _keep_others(output)
        if output.is_fifo():  # whoever reads from it would take the end of this for the end of all
            return
        with _open_output(output, os.O_APPEND) if output.exists() else TemporaryFile(dir=output.parent):
            pass


def check_appendable(log: Path) -> None:
    """Refuse a log that a run would fail to continue; it is not changed."""
    try:
        os.close(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    except OSError as problem:
        raise UserError(f"{log} cannot be written: {problem.strerror}; remove it") from None


def write_output(output: Path, text: str) -> None:
    """Write the file of `--output`."""
    with _refused(output):
        _keep_others(output)
        with _open_output(output, os.O_CREAT | os.O_TRUNC) as file:
            file.write(text.encode())


def _keep_others(output: Path) -> None:
    """What a command was given stays, and so do checkpoints."""
    keep_checkpoints("output=", output)
    with suppress(FileNotFoundError):
        facts = output.stat()
        if (facts.st_dev, facts.st_ino) in SOURCES:
            raise UserError(f"output={output} is a file that this command reads; use another name")


def _open_output(output: Path, flags: int) -> BinaryIO:
    """A FIFO that nobody reads is refused: without O_NONBLOCK this would wait for a reader for ever."""
    handle = os.open(output, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    os.set_blocking(handle, True)
    return os.fdopen(handle, "wb")


@contextmanager
def _refused(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"output={output} cannot be written: {problem.strerror}; name a file in a folder that exists"
        ) from None
