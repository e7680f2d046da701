"""What a rank communicates with others in a step, in one form for the planner, which predicts it, and the engine, which
counts it.

A collective counts the bytes of the whole tensor it is about, whichever part a rank holds before or after: what an
all-reduce sums, what an all-gather makes whole, what a reduce-scatter takes apart, and all that a rank hands to an
all-to-all, its own chunk included. A message counts where it is sent. A group of one rank communicates nothing. So
every count is a whole number that the layout alone decides, the same whether shared memory, gloo or NCCL carries it;
what a ring sends over the wire follows from it (`Entry.sent`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

FILES = "communication-*.jsonl"
"""In the folder of a run that counts (`output.count_communication`)."""
WIRE: dict[Kind, int] = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""How often a ring of n ranks sends (n − 1) / n of the tensor past each of them."""


@dataclass(frozen=True)
class Entry:
    """Collectives of one kind in one dimension."""

    calls: int
    bytes: int
    ranks: int
    """Of the group."""
    kind: Kind

    @property
    def sent(self) -> float:
        """Bytes this rank puts on the wire, by the ring algorithm."""
        return self.bytes * WIRE[self.kind] * (self.ranks - 1) / self.ranks if self.kind in WIRE else self.bytes


class Ledger:
    """Entries by dimension (the kind of group: tp, pp, data, …) and kind of collective."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, Kind], Entry] = {}

    def add(self, dimension: str, kind: Kind, ranks: int, size: int, calls: int = 1) -> None:
        """Enter so many collectives of `size` bytes each."""
        if ranks < 2 or not calls:
            return
        old = self.entries.get((dimension, kind))
        known_calls, known_bytes = (old.calls, old.bytes) if old else (0, 0)
        self.entries[dimension, kind] = Entry(known_calls + calls, known_bytes + calls * size, ranks, kind)

    def take(self) -> Ledger:
        """Hand over what was entered since the last call."""
        taken = Ledger()
        taken.entries, self.entries = self.entries, {}
        return taken

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def rows(self) -> list[dict[str, Any]]:
        """As JSON holds it."""
        return [
            {"dimension": dimension, "kind": kind, "ranks": entry.ranks, "calls": entry.calls, "bytes": entry.bytes}
            for (dimension, kind), entry in sorted(self.entries.items())
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """The inverse of `rows`."""
        ledger = cls()
        for row in rows:
            entry = Entry(row["calls"], row["bytes"], row["ranks"], row["kind"])
            ledger.entries[row["dimension"], row["kind"]] = entry
        return ledger

    def as_line(self, step: int) -> str:
        """What a rank writes into `communication-RANK.jsonl` after a step, counted from 1."""
        return json.dumps({"step": step, "collectives": self.rows()}) + "\n"

    @classmethod
    def from_row(cls, told: dict[str, Any]) -> Ledger:
        """The inverse of `as_line`, read."""
        return cls.from_rows(_collectives(told))

    @staticmethod
    def is_row(told: dict[str, Any]) -> bool:
        """Whether `from_row` can read it."""
        rows = _collectives(told) if type(told.get("step")) is int else None
        numbers, words = ("calls", "bytes", "ranks"), ("kind", "dimension")
        return isinstance(rows, list) and all(
            isinstance(row, dict)
            and all(isinstance(row.get(name), int) for name in numbers)
            and all(isinstance(row.get(name), str) for name in words)
            for row in rows
        )


def _collectives(told: dict[str, Any]) -> Any:
    """Of a row; older runs wrote `exchanges`."""
    try:
        return told["collectives"] if "collectives" in told else told["exchanges"]
    except KeyError:
        return None


def differences(counted: Ledger, predicted: Ledger) -> list[str]:
    """Where two ledgers differ, one sentence each."""
    found = []
    for key in sorted(counted.entries.keys() | predicted.entries.keys()):
        seen, expected = (
            f"{entry.calls} of {entry.bytes} bytes over {entry.ranks} ranks" if entry else "none"
            for entry in (counted.entries.get(key), predicted.entries.get(key))
        )
        if seen != expected:
            found.append(f"{key[0]} {key[1]}: counted {seen}, predicted {expected}")
    return found
