"""A file of JSON rows, one per step, that survives its writer being killed and its disk being full."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuboid.console import say


class Rows:
    def __init__(self, path: Path, done: int = 0) -> None:
        """Rows of the first `done` steps are kept; those of steps that will be done again are dropped."""
        self._path = path
        self._waiting = b""
        self._warned = False
        kept = [row for row in whole_rows(path) if row["step"] <= done] if done else []
        _replace(path, kept)
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        """What the disk does not take now is tried again with the next row: a full disk does not end a training."""
        self._waiting += _line(row)
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._warned = False
        except OSError as error:
            self._warn(error)

    def add_to_last(self, name: str, values: list[Any]) -> None:
        """More for a list of the last row, which stands in the file already."""
        try:
            rows = whole_rows(self._path)
            if rows:
                rows[-1][name] = rows[-1].get(name, []) + values
                _replace(self._path, rows)
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            say(f"{self._path} cannot be written: {error.strerror or error}; the training continues", as_warning=True)
        self._warned = True


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Up to the first that is no row: who is killed, or loses power, leaves a part of the last one, or zeros for it."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def last_step(path: Path) -> int:
    """Of the last whole row; 0 if there is none."""
    rows = whole_rows(path)
    return int(rows[-1]["step"]) if rows else 0


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _replace(path: Path, rows: list[dict[str, Any]]) -> None:
    """All at once: whoever is killed here leaves the old rows or the new ones."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.write_bytes(b"".join(map(_line, rows)))
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def layer_names(kind: str, count: int) -> list[str]:
    """What the numbers of a kind in `layers` of a row belong to: activations to blocks, the rest to the embedding and
    the head too."""
    if kind == "activation_rms":
        return [str(layer) for layer in range(count)]
    return ["embedding", *(str(layer) for layer in range(count - 2)), "head"][:count]
