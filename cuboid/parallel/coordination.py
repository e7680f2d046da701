"""How all ranks of a job tell each other small things over the store where they met: checkpoints need that, from a
thread that must not touch NCCL, and a group of all ranks over gloo would open a socket between every two of them.

Ranks form a tree with rank 0 at its root. What they say goes up the tree in bundles and comes down in bundles; what all
are told is one key that everybody reads. A call costs a rank a few keys of the store, whatever the number of ranks, and
all of them are deleted."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch.distributed as dist

from cuboid.telemetry.heartbeat import HEARTBEAT

FAN = 32
"""Children of a rank in the tree: three levels for 16,384 ranks."""
LARGEST = 4 << 20
"""Bytes of one value; TCPStore takes no more than 8 MiB."""

Told = TypeVar("Told")


class _Met:
    """Where the ranks of this process's job met, and how many connections were opened to it since."""

    store: Any = None
    opened = 0


def remember_store(store: Any) -> None:
    """Called by who makes the process group of all ranks."""
    _Met.store, _Met.opened = store, 0


def open_coordination(seconds: float) -> Coordination:
    """With a connection of its own, because a thread that waits at the store keeps it from others. Every rank calls
    this, in the same order if several are opened; alone, a rank needs no store."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Coordination(None, 0, 1, seconds)
    _Met.opened += 1
    # A connection to the TCPStore of the process group, under its own prefix: no key meets another's.
    own = dist.PrefixStore(str(_Met.opened), _Met.store.clone())  # type: ignore[attr-defined]
    return Coordination(own, dist.get_rank(), dist.get_world_size(), seconds)


class Coordination:
    """Every rank calls the same methods in the same order. Whoever is not answered within `seconds` raises a
    `TimeoutError`; then only a new one can be used."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float, session: int = 0) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self.store, self._session = store, session
        self._until: float | None = None
        self._calls = 0
        self._read_by_all: list[str] = []
        """What rank 0 told all, and deletes once it knows that all have read it."""

    @property
    def children(self) -> range:
        return range(min(self.size, FAN * self.rank + 1), min(self.size, FAN * self.rank + FAN + 1))

    def renew(self) -> Coordination:
        """A fresh one over the same connection, whatever became of this one, which is used no more. All that it does
        must be done within `seconds` from now."""
        fresh = Coordination(self.store, self.rank, self.size, self.seconds, self._session + 1)
        fresh._read_by_all = self._read_by_all
        fresh._until = time.monotonic() + self.seconds
        return fresh

    def gather(self, own: Told) -> list[Told]:
        """On rank 0 what every rank says, in order; nothing elsewhere."""
        with self._call():
            found = self._bundle([(self.rank, pickle.dumps(own))], lambda lists: list(chain.from_iterable(lists)))
        return [pickle.loads(said) for _, said in sorted(found)] if self.rank == 0 else []

    def scatter(self, parts: list[Told]) -> Told:
        """`parts`: what rank 0 has for each rank; ranks that get the same object get the same bytes."""
        with self._call():
            known: dict[int, bytes] = {}
            for part in parts:
                known.setdefault(id(part), pickle.dumps(part))
            bundle = {rank: known[id(part)] for rank, part in enumerate(parts)}
            if self.rank:
                bundle = self._take(self._down(self.rank))
            for child in self.children:
                below = {rank: bundle[rank] for rank in subtree(child, self.size)}
                self._put(self._down(child), below)
        answer: Told = pickle.loads(bundle[self.rank])
        return answer

    def broadcast(self, own: Told) -> Told:
        """What rank 0 says."""
        with self._call():
            return self._tell_all(own)

    def agree(self, problem: str) -> str:
        """The problem of the first rank that has one, on all ranks; empty if none has. Nobody returns before all have
        called."""
        with self._call():
            first = self._bundle((self.rank if problem else self.size, problem), min)
            return self._tell_all(first)[1]

    def _bundle(self, own: Told, merge: Callable[[list[Told]], Told]) -> Told:
        """What the ranks below say, merged with what this one says, goes to the rank above."""
        whole = merge([own, *(self._take(self._up(child)) for child in self.children)])
        if self.rank:
            self._put(self._up(self.rank), whole)
        for key in self._read_by_all:  # who has answered now had read what was told before
            self.store.delete_key(key)
        self._read_by_all.clear()
        return whole

    def _tell_all(self, own: Told) -> Told:
        if self.size == 1:
            return own
        key = f"{self._session}/{self._calls}/all"
        if self.rank:
            told: Told = self._take(key, delete=False)
            return told
        self._read_by_all += self._put(key, own)
        return own

    def _up(self, rank: int) -> str:
        return f"{self._session}/{self._calls}/up/{rank}"

    def _down(self, rank: int) -> str:
        return f"{self._session}/{self._calls}/down/{rank}"

    def _call(self) -> AbstractContextManager[None]:
        """One more begins; that this rank waits is noted, unless it is only the thread of a save."""
        self._calls += 1
        noted = threading.current_thread() is threading.main_thread() and self.size > 1
        return HEARTBEAT.everybody().collective("agreement") if noted else nullcontext()

    def _put(self, key: str, value: object) -> list[str]:
        """The keys that it takes."""
        content = pickle.dumps(value)
        parts = [content[start : start + LARGEST] for start in range(0, len(content), LARGEST)]
        keys = [key, *(f"{key}/{number}" for number in range(1, len(parts)))]
        # Long values go in parts, because TCPStore takes no value above 8 MiB.
        for each, part in zip(keys[1:], parts[1:], strict=True):
            self.store.set(each, part)
        self.store.set(key, len(parts).to_bytes(4, "little") + parts[0])  # last: it is what is waited for
        return keys

    def _take(self, key: str, delete: bool = True) -> Any:
        left = self.seconds if self._until is None else max(0.1, self._until - time.monotonic())
        try:
            self.store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            told = f"what is expected at {key} did not come within {self.seconds:g} s"
            raise TimeoutError(f"{told} ({str(error).splitlines()[0]})") from None
        first = self.store.get(key)
        keys = [key, *(f"{key}/{number}" for number in range(1, int.from_bytes(first[:4], "little")))]
        content = b"".join([first[4:], *(self.store.get(each) for each in keys[1:])])
        for each in keys if delete else ():
            self.store.delete_key(each)
        return pickle.loads(content)


def subtree(rank: int, size: int) -> list[int]:
    """A rank and all below it.

    >>> subtree(1, 36)
    [1, 33, 34, 35]
    """
    found, level = [], range(rank, rank + 1)
    while level.start < size:
        found += [*range(level.start, min(level.stop, size))]
        level = range(FAN * level.start + 1, FAN * level.stop + 1)
    return found
