"""The same operations on whatever fsspec reaches: object stores, which rename nothing, and other file systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuboid.errors import UserError


def open_remote(url: str) -> tuple[RemoteFiles, str]:
    """The store a URL names, and the path in it."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url} cannot be reached: {error}; use a protocol that fsspec and its drivers know") from None
    return RemoteFiles(system), path.rstrip("/")


@dataclass(frozen=True)
class RemoteFiles:
    _system: Any

    renames = False
    read_size = 16 << 20  # each costs a request

    def make_folder(self, path: str) -> None:
        self._system.makedirs(path, exist_ok=True)

    def open(self, path: str) -> Any:
        return self._system.open(path, "wb")

    def write(self, handle: Any, content: memoryview) -> None:
        handle.write(content)

    def fsync(self, handle: Any) -> None:
        """A store keeps a file when it is closed."""

    def close(self, handle: Any) -> None:
        handle.close()

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("a store does not rename folders")

    def fsync_folder(self, path: str) -> None:
        pass

    def remove(self, path: str) -> None:
        if not self.is_folder(path):
            self._system.rm_file(path)
        elif self._system.exists(path):  # most stores have no folders but those of the files in them
            self._system.rmdir(path)

    def names(self, path: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {entry.rstrip("/").rpartition("/")[2] for entry in entries if entry.rstrip("/") != path}
        return sorted(names)

    def is_folder(self, path: str) -> bool:
        return bool(self._system.isdir(path))

    def size(self, path: str) -> int | None:
        try:
            facts = self._system.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(facts["size"]) if facts["type"] == "file" and not facts.get("islink") else None

    def prefetch(self, path: str) -> None:
        pass

    def read_into(self, path: str, position: int, buffer: memoryview) -> None:
        content = self._system.cat_file(path, start=position, end=position + buffer.nbytes)
        if len(content) != buffer.nbytes:
            raise OSError(f"{path} ends at byte {position + len(content)}")
        buffer[:] = content

    def shown(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))
