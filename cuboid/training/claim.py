"""One run at a time in a folder: two that write the same checkpoints would each sweep away what the other writes."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cuboid.errors import UserError

PATIENCE = 3.0
"""Seconds in which a run that was just killed may still be ending."""
HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def claimed(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """The system gives the claim back when this process ends, however it ends; file systems without locks have none."""
    handle: int | None = None
    with suppress(OSError):  # what is wrong with the folder is said where it is written
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if handle is not None:
            _lock(handle, folder, time.monotonic() + patience)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int, folder: Path, until: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                return None
        if time.monotonic() >= until:
            raise UserError(f"output.folder={folder} is in use by another run; stop that one, or use another folder")
        time.sleep(0.05)
