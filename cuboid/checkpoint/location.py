"""A place where checkpoints lie: a path of this machine, or a URL that fsspec reaches.

locate("runs/a/checkpoints") / "step-00000120"
locate("s3://bucket/checkpoints")
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from cuboid.errors import UserError

# What a checkpoint does with files, on this machine's file systems. Every change goes through one method here, one
# event each, so that a test can stop a job before, in the middle of, or after any of them.


WORTH_BEGINNING = 1 << 20
"""Bytes in one write from which its way to the disk begins at once."""


class Files(Protocol):
    """Paths are strings. Handles are whatever `open` gives."""

    renames: bool
    """Whether a folder can be renamed in one event; if not, a checkpoint is published by writing its manifest last."""

    read_size: int
    """Bytes to read at a time when a whole file is read."""

    # What changes something.

    def make_folder(self, path: str) -> None:
        """And those above it."""

    def make_inner_folder(self, path: str) -> None:
        """Only where the folder above is there: one that was removed, or unmounted, is not made anew."""

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

    def make_inner_folder(self, path: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(path)

    def open(self, path: str) -> int:
        # Without O_NONBLOCK a FIFO that nobody reads would block here.
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

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


# The same operations on whatever fsspec reaches: object stores, which rename nothing, and other file systems.


NO_STORES = frozenset(
    "blockcache cached filecache simplecache reference generic dir async_wrapper asynclocal data zip tar libarchive "
    "github gist git jupyter dask".split()
)
"""Protocols of fsspec that are caches, views and archives of others, or cannot be written."""


def open_remote(url: str) -> tuple[RemoteFiles, str]:
    """The store a URL names, and the path in it."""
    import fsspec

    instead = "use a URL that fsspec and its drivers reach"
    protocol = url.partition("://")[0]
    if "::" in url or protocol in NO_STORES:
        raise UserError(f"{url} is no store of files; {instead}, such as s3://bucket/folder")
    try:
        system, path = fsspec.core.url_to_fs(url)
        if not isinstance(path, str):
            raise ValueError(f"it names {len(path)} places")
        # Asked once here, because every driver fails in its own way where it has no host, no key or no bucket, and
        # twice: some say of what they do not reach that it is no folder, others that it is not there.
        system.isdir(path)
        with suppress(FileNotFoundError):
            system.info(path)
    except Exception as error:
        raise UserError(f"{url} cannot be reached: {str(error) or type(error).__name__}; {instead}") from None
    return RemoteFiles(system), path.rstrip("/")


Method = TypeVar("Method", bound=Callable[..., Any])


def _named(method: Method) -> Method:
    """Drivers raise errors of their own, which nobody knows by name: they become an OSError that names the place."""

    @wraps(method)
    def reached(files: RemoteFiles, place: Any, *arguments: Any) -> Any:
        try:
            return method(files, place, *arguments)
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise
            said = (str(error).splitlines() or [""])[0] or type(error).__name__
            kind = errno.ENOENT if isinstance(error, FileNotFoundError) else getattr(error, "errno", None) or errno.EIO
            raise OSError(kind, said, str(getattr(place, "path", place))) from error

    return cast(Method, reached)


@dataclass(frozen=True)
class RemoteFiles:
    _system: Any

    renames = False
    read_size = 16 << 20  # each costs a request

    @_named
    def make_folder(self, path: str) -> None:
        self._system.makedirs(path, exist_ok=True)

    def make_inner_folder(self, path: str) -> None:
        """Most stores have no folders but those of the files in them."""
        self.make_folder(path)

    @_named
    def open(self, path: str) -> Any:
        return self._system.open(path, "wb")

    @_named
    def write(self, handle: Any, content: memoryview) -> None:
        handle.write(content)

    def fsync(self, handle: Any) -> None:
        """A store keeps a file when it is closed."""

    @_named
    def close(self, handle: Any) -> None:
        handle.close()

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("a store does not rename folders")

    def fsync_folder(self, path: str) -> None:
        pass

    @_named
    def remove(self, path: str) -> None:
        if not self.is_folder(path):
            self._system.rm_file(path)
        elif self._system.exists(path):  # most stores have no folders but those of the files in them
            self._system.rmdir(path)

    @_named
    def names(self, path: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {entry.rstrip("/").rpartition("/")[2] for entry in entries if entry.rstrip("/") != path}
        return sorted(names)

    @_named
    def is_folder(self, path: str) -> bool:
        return bool(self._system.isdir(path))

    @_named
    def size(self, path: str) -> int | None:
        try:
            facts = self._system.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(facts["size"]) if facts["type"] == "file" and not facts.get("islink") else None

    def prefetch(self, path: str) -> None:
        pass

    @_named
    def read_into(self, path: str, position: int, buffer: memoryview) -> None:
        content = self._system.cat_file(path, start=position, end=position + buffer.nbytes)
        if len(content) != buffer.nbytes:
            raise OSError(f"{path} ends at byte {position + len(content)}")
        buffer[:] = content

    def shown(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))


@dataclass(frozen=True)
class Location:
    files: Files
    path: str

    def __truediv__(self, name: str) -> Location:
        return Location(self.files, f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.files.shown(self.path)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return Location(self.files, self.path.rpartition("/")[0] or ".")

    def names(self) -> list[str]:
        return self.files.names(self.path)

    @property
    def size(self) -> int | None:
        """None if this is no plain file."""
        return self.files.size(self.path)

    @property
    def exists(self) -> bool:
        return self.size is not None or self.files.is_folder(self.path)

    def read(self) -> bytes:
        content = bytearray(self.size or 0)
        self.files.read_into(self.path, 0, memoryview(content))
        return bytes(content)

    def write_durably(self, content: bytes | memoryview) -> None:
        handle = self.files.open(self.path)
        try:
            self.files.write(handle, memoryview(content))
            self.files.fsync(handle)
        finally:
            self.files.close(handle)

    def make_folder(self) -> None:
        self.files.make_folder(self.path)

    def make_inner_folder(self) -> None:
        self.files.make_inner_folder(self.path)

    def rename(self, other: Location) -> None:
        self.files.rename(self.path, other.path)

    def remove(self, first: str = "") -> None:
        """With all it holds, if it is a folder: what is named first goes first. A link goes, not what it leads to."""
        if self.exists or self.name in self.parent.names():
            self._remove(first)

    def _remove(self, first: str = "") -> None:
        for name in sorted(self.names(), key=lambda name: name != first) if self.files.is_folder(self.path) else ():
            (self / name)._remove()
        self.files.remove(self.path)


def locate(place: str | os.PathLike[str] | Location) -> Location:
    if isinstance(place, Location):
        return place
    text = os.fspath(place)
    if "://" in text:
        return Location(*open_remote(text))
    return Location(LocalFiles(), text.rstrip("/") or "/")
