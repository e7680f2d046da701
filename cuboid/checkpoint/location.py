"""A place where checkpoints lie: a path of this machine, or a URL that fsspec reaches.

locate("runs/a/checkpoints") / "step-00000120"
locate("s3://bucket/checkpoints")
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from cuboid.checkpoint.files import Files, LocalFiles
from cuboid.checkpoint.remote import open_remote


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
