"""What a checkpoint says of itself, and whether it is true; read without running anything of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from cuboid import __version__
from cuboid.errors import UserError

MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT = 1
DATA_FILE = re.compile(r"data-\d{5,}\.bin")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def checksum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Manifest:
    step: int
    """Optimizer steps done; with the global batch this is also the position in the data."""
    updates: int
    """Times the optimizer changed the parameters: fewer, where a step was not finite and left out."""
    position: int
    """Samples consumed, in the global order."""
    layout: str
    """The layout that wrote it, for people; any layout can read it."""
    run: str
    """The run as TOML."""
    version: str = __version__

    def write(self, folder: Path, checksums: dict[str, str]) -> None:
        files = {
            name: {"bytes": (folder / name).stat().st_size, "sha256": checksum}
            for name, checksum in sorted(checksums.items())
        }
        table = {"format": FORMAT, **self.__dict__, "files": files}
        write_durably(folder / MANIFEST, json.dumps(table, indent=1).encode())


def damage(folder: Path, reason: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {reason}; use another checkpoint")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        table = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        raise damage(folder, f"{name} is missing") from None
    except (OSError, ValueError) as error:
        raise damage(folder, f"{name} cannot be read ({error})") from None
    if not isinstance(table, dict):
        raise damage(folder, f"{name} is not a table")
    return table


def read_manifest(folder: Path) -> Manifest:
    table = _read_json(folder, MANIFEST)
    if table.get("format") != FORMAT:
        raise damage(folder, f"{MANIFEST} has format {table.get('format')!r}, not {FORMAT}")
    try:
        names = ("step", "updates", "position", "layout", "run", "version")
        manifest = Manifest(**{name: table[name] for name in names})
    except KeyError as error:
        raise damage(folder, f"{MANIFEST} lacks {error}") from None
    if not all(isinstance(number, int) for number in (manifest.step, manifest.updates, manifest.position)):
        raise damage(folder, f"{MANIFEST} has a step that is no number")
    return manifest


def verify(folder: Path, contents: bool = True) -> Manifest:
    """The manifest if every file is as it says; a UserError names the file that is not, and why.

    Without `contents` only names and sizes are compared."""
    manifest = read_manifest(folder)
    files = _read_json(folder, MANIFEST).get("files")
    if not isinstance(files, dict) or INDEX not in files:
        raise damage(folder, f"{MANIFEST} lists no files")
    for name, facts in files.items():
        if name != INDEX and not DATA_FILE.fullmatch(name):
            raise damage(folder, f"{name!r} is no name of a checkpoint's file")
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise damage(folder, f"{name} is missing")
        if path.stat().st_size != facts.get("bytes"):
            raise damage(folder, f"{name} has {path.stat().st_size} bytes, not {facts.get('bytes')}")
        if contents and checksum_of(path) != facts.get("sha256"):
            raise damage(folder, f"{name} does not match its checksum")
    return manifest


def check_index(folder: Path) -> dict[str, Any]:
    """The index, with every number that decides what is read or allocated checked against the files."""
    index = _read_json(folder, INDEX)
    for name, entry in index.items():
        try:
            size = DTYPES[entry["dtype"]].itemsize
            shape = [int(length) for length in entry["shape"]]
            covered = 0
            for chunk in entry["chunks"]:
                lengths, offsets = chunk["lengths"], chunk["offsets"]
                inside = all(
                    offset >= 0 and length > 0 and offset + length <= limit
                    for offset, length, limit in zip(offsets, lengths, shape, strict=True)
                )
                if not inside or chunk["bytes"] != prod(lengths) * size or not DATA_FILE.fullmatch(chunk["file"]):
                    raise ValueError("a chunk lies outside its tensor")
                path = folder / chunk["file"]
                if path.is_symlink() or not 0 <= chunk["position"] <= path.stat().st_size - chunk["bytes"]:
                    raise ValueError("a chunk lies outside its file")
                covered += prod(lengths)
            if covered != prod(shape):
                raise ValueError("its chunks do not make the whole tensor")
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise damage(folder, f"{INDEX} is wrong about {name} ({error})") from None
    return index
