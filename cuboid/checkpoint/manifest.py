"""What a checkpoint says of itself, and whether it is true; read without running anything of it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from cuboid import __version__
from cuboid.checkpoint.checksum import NAME, checksum_of_bytes, checksum_of_file
from cuboid.checkpoint.location import Location, locate
from cuboid.errors import UserError

MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT = 2
DATA_FILE = re.compile(r"data-\d{5,}\.bin")

Place = str | os.PathLike[str] | Location


@dataclass(frozen=True)
class StoredFile:
    """What a file must be."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    step: int
    """Optimizer steps done; with the global batch this is also the position in the data."""
    updates: int
    """Times the optimizer changed the parameters: fewer, where a step was not finite and left out."""
    position: int
    """Samples consumed, in the global order."""
    data: str
    """Which samples, in which order: the identity a run must share to go on from here."""
    layout: str
    """The layout that wrote it, for people; any layout can read it."""
    run: str
    """The run as TOML."""
    version: str = __version__
    torch_version: str = str(torch.__version__)
    files: dict[str, StoredFile] = field(default_factory=dict, hash=False)

    def render(self) -> bytes:
        table = {"format": FORMAT, "checksums": NAME, **asdict(self)}
        table["checksum"] = checksum_of_bytes(json.dumps(table).encode())
        return json.dumps(table, indent=1).encode()


def damage(folder: Location, reason: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {reason}; use another checkpoint")


def read_json(folder: Location, name: str) -> dict[str, Any]:
    place = folder / name
    try:
        if place.size is None:
            raise damage(folder, f"{name} is missing")
        table = json.loads(place.read())
    except (OSError, ValueError) as error:
        raise damage(folder, f"{name} cannot be read ({error})") from None
    if not isinstance(table, dict):
        raise damage(folder, f"{name} is not a table")
    return table


def read_manifest(place: Place) -> Manifest:
    """A UserError if a single byte of it is not what was written."""
    folder = locate(place)
    table = read_json(folder, MANIFEST)
    if table.get("format") != FORMAT:
        raise damage(folder, f"{MANIFEST} has format {table.get('format')!r}, not {FORMAT}")
    try:
        values = {each.name: table[each.name] for each in fields(Manifest)}
        values["files"] = {name: StoredFile(**facts) for name, facts in table["files"].items()}
        manifest = Manifest(**values)
        whole = manifest.render() == (folder / MANIFEST).read()
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise damage(folder, f"{MANIFEST} lacks or misspells {error}") from None
    if not whole:
        raise damage(folder, f"{MANIFEST} does not match its checksum")
    numbers = (manifest.step, manifest.updates, manifest.position, *(file.bytes for file in manifest.files.values()))
    if not all(isinstance(number, int) for number in numbers):
        raise damage(folder, f"{MANIFEST} has a step or size that is no number")
    if INDEX not in manifest.files:
        raise damage(folder, f"{MANIFEST} lists no {INDEX}")
    for name in manifest.files:
        if name != INDEX and not DATA_FILE.fullmatch(name):
            raise damage(folder, f"{name!r} is no name of a checkpoint's file")
    return manifest


def check_file(folder: Location, name: str, expected: StoredFile, contents: bool = True) -> None:
    size = (folder / name).size
    if size is None:
        raise damage(folder, f"{name} is missing")
    if size != expected.bytes:
        raise damage(folder, f"{name} has {size} bytes, not {expected.bytes}")
    try:
        same = not contents or checksum_of_file(folder / name, size) == expected.checksum
    except OSError as error:
        raise damage(folder, f"{name} cannot be read ({error})") from None
    if not same:
        raise damage(folder, f"{name} does not match its checksum")


def verify(place: Place, contents: bool = True) -> Manifest:
    """The manifest if every file is as it says; a UserError names the file that is not, and why.

    Without `contents` only names and sizes are compared."""
    folder = locate(place)
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        check_file(folder, name, expected, contents)
    return manifest
