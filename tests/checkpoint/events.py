"""Every change a process makes to the files below a folder, seen as it happens, and the end of the process at one.

The functions through which Python reaches the file system are wrapped in place, so that whatever the program does is
seen, by whichever way it comes; Python's own audit of them tells whether one was missed. The file system is the real
one, and so is the SIGKILL."""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
AUDITED = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir"}
HOOKED = ("open", *AUDITED.values())


class Event(NamedTuple):
    kind: str
    name: str
    """Below the folder; steps are counted from where the process began."""
    occurrence: int
    """The how many of this kind and name; 0 is the first."""


class Death(NamedTuple):
    event: Event
    written: float | None = None
    """None: before the event. Else it is a write, and so much of it reaches the file."""
    with_all: bool = False
    """Whether the other ranks are killed in the same moment, or left to find out."""


class Watcher:
    """Installed in a process that will not live long; never taken out again."""

    def __init__(self, folder: str, begin: int, death: Death | None, mark: str, others: list[int]) -> None:
        self._folder, self._begin = os.path.abspath(folder), begin
        self._death, self._mark, self._others = death, mark, others
        self._seen: Counter[tuple[str, str]] = Counter()
        self._open: dict[int, str] = {}
        self._write = os.write
        self.events: list[Event] = []
        self.audited: Counter[str] = Counter()
        """What Python itself says happened below the folder."""

    def install(self) -> None:
        sys.addaudithook(self._audit)
        self._wrap_open()
        self._wrap("mkdir", "mkdir")
        self._wrap("replace", "rename", 1)
        self._wrap("rename", "rename", 1)
        self._wrap("unlink", "remove")
        self._wrap("remove", "remove")
        self._wrap("rmdir", "rmdir")
        self._wrap_handles()

    def name_of(self, path: Any, folder_handle: int | None = None) -> str | None:
        """None if it is not below the folder."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if folder_handle is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder_handle}"), text)
        text = os.path.abspath(text)
        if not text.startswith(self._folder + os.sep):
            return None
        text = text.replace(f".{os.getpid()}", "")  # so that lives are alike
        return re.sub(
            r"step-(\d{8})", lambda match: f"step{int(match[1]) - self._begin:+d}", text[len(self._folder) + 1 :]
        )

    def happens(self, kind: str, name: str, write_part: Callable[[float], None] | None = None) -> None:
        """About to happen."""
        event = Event(kind, name, self._seen[kind, name])
        self._seen[kind, name] += 1
        self.events.append(event)
        if self._death is not None and self._death.event == event:
            if self._death.written is not None:
                assert write_part is not None
                write_part(self._death.written)
            self._die()

    def _die(self) -> None:
        handle = real_open(self._mark, os.O_WRONLY | os.O_CREAT)
        self._write(handle, b"died here")
        if self._death is not None and self._death.with_all:
            for process in self._others:
                os.kill(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _wrap(self, function: str, kind: str, names_at: int = 0) -> None:
        """`names_at`: which argument is the path that counts; the new one of a rename."""
        real = getattr(os, function)

        def watched(*arguments: Any, **options: Any) -> Any:
            name = self.name_of(arguments[names_at], options.get("dir_fd"))
            if name is not None:
                self.happens(kind, name)
            return real(*arguments, **options)

        setattr(os, function, watched)

    def _wrap_open(self) -> None:
        def watched(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            name = self.name_of(path, options.get("dir_fd"))
            if name is not None and flags & CHANGING:
                self.happens("open", name)
            handle = real_open(path, flags, *rest, **options)
            self._open.pop(handle, None)
            if name is not None:
                self._open[handle] = name
            return handle

        os.open = watched
        watcher, real = self, io.open

        class Raw(io.FileIO):
            def write(self, content: Any) -> int:
                view = memoryview(content).cast("B")
                name = watcher._open[self.fileno()]
                write = super().write
                watcher.happens("write", name, lambda part: write(view[: round(part * len(view))]))  # type: ignore[arg-type, return-value]
                return write(view)

        def watched_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
            name = self.name_of(file)
            if name is None or not set(mode) & set("wax+"):
                return real(file, mode, buffering, *rest, **options)
            self.happens("open", name)
            raw = Raw(file, "".join(letter for letter in mode if letter not in "bt"))
            self._open[raw.fileno()] = name
            if buffering == 0:
                return raw
            buffered = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **options)

        io.open = builtins.open = watched_file

    def _wrap_handles(self) -> None:
        real_fsync = os.fsync

        def watched_write(handle: int, content: Any) -> int:
            if handle in self._open:
                view = memoryview(content).cast("B")
                part = lambda part: self._write(handle, view[: round(part * len(view))])  # noqa: E731
                self.happens("write", self._open[handle], part)  # type: ignore[arg-type]
            return self._write(handle, content)

        def watched_fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            if number in self._open:
                self.happens("fsync", self._open[number])
            real_fsync(handle)

        os.write, os.fsync = watched_write, watched_fsync

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.name_of(arguments[0]) is not None and (arguments[2] or 0) & CHANGING:
            self.audited["open"] += 1
        elif event in AUDITED:
            handle = arguments[-1] if isinstance(arguments[-1], int) and arguments[-1] >= 0 else None
            path = arguments[1] if event == "os.rename" else arguments[0]
            if self.name_of(path, handle) is not None:
                self.audited[AUDITED[event]] += 1

    def missed(self) -> dict[str, int]:
        """Of the kinds that Python audits: how many more it saw than were caught."""
        caught = Counter(event.kind for event in self.events)
        return {kind: self.audited[kind] - caught[kind] for kind in HOOKED if self.audited[kind] != caught[kind]}


real_open = os.open
