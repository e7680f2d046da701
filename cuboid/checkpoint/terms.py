"""Who may write a run's folder when its job runs on many nodes: the supervisor with the newest term, and ranks it
started. All nodes see the folder, and what must never have two writers is the folder: so the folder decides.

RUN/leader-00000003.json      the third term: who leads, where it is reached, and a number that it raises every second

A term is taken by making its file, which the file system lets one node do. Who leads and finds a newer term stops; a
rank asks before it publishes a checkpoint."""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cuboid.readers import Unreadable, read_json

PATTERN = "leader-*.json"


@dataclass(frozen=True)
class Term:
    number: int
    leader: str = ""
    address: str = ""
    port: int = 0
    beat: int = 0
    locked: bool = False
    """Whether who leads holds the lock of the folder: only then a free lock says that its supervisor has ended."""


class Terms:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Term | None:
        """None: nobody ever led this run."""
        number = max(self._numbers(), default=0)
        if not number:
            return None
        try:
            told = read_json(self._path(number), 4096)
            place = str(told["leader"]), str(told["address"]), int(told["port"])
            return Term(number, *place, int(told["beat"]), told.get("locked") is True)
        except (Unreadable, ValueError, TypeError, KeyError):
            return Term(number)  # it is taken all the same

    def take(self, term: Term) -> bool:
        """Whether this node was the first to take it. Older ones are forgotten."""
        aside = self._write(term)
        try:
            os.link(aside, self._path(term.number))
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        newest = self.newest()
        if newest is None or newest.number != term.number:
            return False  # a newer one was taken since this node looked, and its taker has forgotten this one
        for number in self._numbers():
            if number < term.number:
                with suppress(OSError):
                    self._path(number).unlink()
        return True

    def beat(self, term: Term) -> Term:
        """Who leads lives."""
        later = replace(term, beat=term.beat + 1)
        self._write(later).replace(self._path(term.number))
        return later

    def _numbers(self) -> list[int]:
        names = [re.fullmatch(r"leader-(\d{8,})", path.stem) for path in self._folder.glob(PATTERN)]
        return [int(found[1]) for found in names if found is not None]

    def _write(self, term: Term) -> Path:
        aside = self._folder / f".leader.{secrets.token_hex(4)}"
        try:
            aside.write_text(json.dumps(asdict(term)))
        except OSError:  # on a full disk one would stay behind every second
            with suppress(OSError):
                aside.unlink()
            raise
        return aside

    def _path(self, number: int) -> Path:
        return self._folder / f"leader-{number:08d}.json"


class Fence:
    """In a rank: whether the supervisor that started it still leads."""

    def __init__(self) -> None:
        self._terms: Terms | None = None
        self._number = 0

    def set(self, folder: str, number: int) -> None:
        """`number`: 0 where one supervisor has all ranks, and nobody can take over."""
        self._terms, self._number = (Terms(Path(folder)), number) if number else (None, 0)

    def check(self) -> None:
        if self._terms is None:
            return
        newest = self._terms.newest()
        if newest is None or newest.number != self._number:
            raise OSError("another node leads this run now; this one writes nothing more")


FENCE = Fence()
