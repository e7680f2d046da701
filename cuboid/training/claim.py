"""A folder that one run at a time may write: a lock that the system gives back, however its holder ends."""

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


class InUse(UserError):
    """Another process has claimed the folder."""


def try_claim(folder: Path) -> int | None:
    """The handle that holds the claim while it is open; None where the file system has no locks. `BlockingIOError`:
    somebody else has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in HELD:
            raise BlockingIOError(error.errno, "claimed") from None
        return None
    return handle


@contextmanager
def claimed(folder: Path, patience: float = PATIENCE, field: str = "output.folder") -> Iterator[None]:
    """One run at a time in a folder: two that write the same checkpoints would each sweep away what the other writes.
    The system gives the claim back when this process ends, however it ends; file systems without locks have none."""
    handle: int | None = None
    made: list[Path] = []
    with suppress(OSError):  # what is wrong with the folder is said where it is written
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + patience
        while handle is not None and not _lock(handle, folder, until, field):
            os.close(handle)
            handle = None
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        yield
    except UserError:
        with suppress(OSError):  # what is refused leaves nothing behind; what is not empty stays
            for each in made:
                each.rmdir()
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int, folder: Path, until: float, field: str) -> bool:
    """False: who had the lock was refused, and has removed the folder that it had made. Another may be there now."""
    while True:
        # On the folder itself: no lock file stays behind, and the lock ends with the process.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _is_at(handle, folder)
        except OSError as error:
            if error.errno not in HELD:
                return True
        if time.monotonic() >= until:
            raise InUse(f"{field}={folder} is in use by another run; stop that one, or use another folder")
        time.sleep(0.05)


def _is_at(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False
