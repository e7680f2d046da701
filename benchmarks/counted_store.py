"""A store and files that count what ranks ask of them, in memory or before a real store; for benchmarks/scale.py."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from cuboid.checkpoint.location import LocalFiles

SECONDS = 1200.0
"""Until somebody who waits gives up."""


class Store:
    """What all ranks share; each has its own `Counter`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, list[threading.Event]] = {}
        self.lock = threading.Lock()
        self.turn = threading.Lock()
        """Held by the one rank that runs: thousands of threads would fight over the interpreter."""


@dataclass
class Counter:
    """A store as one rank sees it."""

    shared: Store
    calls: int = 0
    bytes: int = 0

    def _note(self, key: str, size: int = 0) -> None:
        self.calls += 1
        self.bytes += len(key) + size

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._note(key, len(content))
        with self.shared.lock:
            self.shared.values[key] = content
            waiting = self.shared.waiting.pop(key, ())
        for event in waiting:
            event.set()

    def add(self, key: str, amount: int) -> int:
        self._note(key, 8)
        with self.shared.lock:
            number = int(self.shared.values.get(key, b"0")) + amount
            self.shared.values[key] = str(number).encode()
        return number

    def wait(self, keys: list[str], limit: timedelta) -> None:
        for key in keys:
            self._note(key)
            event = threading.Event()
            with self.shared.lock:
                if key in self.shared.values:
                    continue
                self.shared.waiting.setdefault(key, []).append(event)
            self.shared.turn.release()
            came = event.wait(limit.total_seconds())
            self.shared.turn.acquire()
            if not came:
                raise RuntimeError(f"{key} did not come")

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=SECONDS))  # which counts it
        content = self.shared.values[key]
        self.bytes += len(content)
        return content

    def delete_key(self, key: str) -> None:
        self._note(key)
        with self.shared.lock:
            del self.shared.values[key]


@dataclass
class Through(Counter):
    """A real store, counted."""

    real: Any = None

    def set(self, key: str, value: bytes | str) -> None:
        self._note(key, len(value))
        self.real.set(key, value)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        for key in keys:
            self._note(key)
        self.real.wait(keys, limit)

    def get(self, key: str) -> bytes:
        content: bytes = self.real.get(key)
        self._note(key, len(content))
        return content

    def delete_key(self, key: str) -> None:
        self._note(key)
        self.real.delete_key(key)


@dataclass(frozen=True)
class MemoryFiles(LocalFiles):
    """As `LocalFiles`, in a table; `looks` has an entry for every look."""

    held: dict[str, bytes | None] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)
    looks: list[str] = field(default_factory=list)

    def make_folder(self, path: str) -> None:
        self.held[path] = None

    def open(self, path: str) -> int:
        self.held[path] = b""
        self.opened[id(path)] = path
        return id(path)

    def write(self, handle: int, content: memoryview) -> None:
        self.held[self.opened[handle]] = (self.held[self.opened[handle]] or b"") + bytes(content)

    def fsync(self, handle: int) -> None:
        pass

    def close(self, handle: int) -> None:
        pass

    def fsync_folder(self, path: str) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        for path in [path for path in self.held if path == old or path.startswith(f"{old}/")]:
            self.held[new + path.removeprefix(old)] = self.held.pop(path)

    def remove(self, path: str) -> None:
        del self.held[path]

    def names(self, path: str) -> list[str]:
        self.looks.append(path)
        found = (name.removeprefix(f"{path}/") for name in list(self.held) if name.startswith(f"{path}/"))
        return sorted(name for name in found if "/" not in name)

    def is_folder(self, path: str) -> bool:
        self.looks.append(path)
        return path in self.held and self.held[path] is None

    def size(self, path: str) -> int | None:
        self.looks.append(path)
        content = self.held.get(path)
        return None if content is None else len(content)

    def prefetch(self, path: str) -> None:
        pass

    def read_into(self, path: str, position: int, buffer: memoryview) -> None:
        self.looks.append(path)
        buffer[:] = (self.held[path] or b"")[position : position + buffer.nbytes]
