"""What a checkpoint does with files, on this machine's file systems. Every change goes through one method here, one
event each, so that a test can stop a job before, in the middle of, or after any of them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Any, Protocol

WORTH_BEGINNING = 1 << 20
"""Bytes in one write from which its way to the disk begins at once."""


class Files(Protocol):
    """Paths are strings. Handles are whatever `open` gives."""

    renames: bool
    """Whether a folder can be renamed in one event; if not, a checkpoint is published by writing its manifest last."""

    read_size: int
    """Bytes to read at a time when a whole file is read."""

    # What changes something.

    def make_folder(self, path: str) -> None: ...

    def open(self, path: str) -> Any:
        """A new, empty file to be written."""

    def write(self, handle: Any, content: memoryview) -> None: ...

    def fsync(self, handle: Any) -> None: ...

    def close(self, handle: Any) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def fsync_folder(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """A file, or a folder that is empty."""

    # What only looks.

    def names(self, path: str) -> list[str]:
        """What a folder holds; nothing if there is none."""

    def is_folder(self, path: str) -> bool: ...

    def size(self, path: str) -> int | None:
        """None if there is no such file, or it is a link or anything else that is no plain file."""

    def prefetch(self, path: str) -> None:
        """All of a file will be read soon."""

    def read_into(self, path: str, position: int, buffer: memoryview) -> None:
        """Fill the buffer; an OSError if the file is too short."""

    def shown(self, path: str) -> str:
        """The path as a person would write it."""


@dataclass(frozen=True)
class LocalFiles:
    renames = True
    read_size = 1 << 20  # what is read is still in the processor's cache when it is looked at

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def open(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, content: memoryview) -> None:
        count = content.nbytes
        while content.nbytes:
            content = content[os.write(handle, content) :]
        if count >= WORTH_BEGINNING and hasattr(os, "posix_fadvise"):
            # Linux begins to bring these pages to the disk, so that the sync at the end finds most of it done.
            os.posix_fadvise(handle, os.lseek(handle, 0, os.SEEK_CUR) - count, count, os.POSIX_FADV_DONTNEED)

    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def fsync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        if self.is_folder(path):
            os.rmdir(path)
        else:
            os.unlink(path)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path) and not os.path.islink(path)

    def size(self, path: str) -> int | None:
        try:
            facts = os.lstat(path)
        except OSError:
            return None
        return facts.st_size if stat.S_ISREG(facts.st_mode) else None

    def prefetch(self, path: str) -> None:
        if hasattr(os, "posix_fadvise"):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def read_into(self, path: str, position: int, buffer: memoryview) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while buffer.nbytes:
                count = os.preadv(handle, [buffer], position)
                if not count:
                    raise OSError(f"{path} ends at byte {position}")
                position += count
                buffer = buffer[count:]
        finally:
            os.close(handle)

    def shown(self, path: str) -> str:
        return path
