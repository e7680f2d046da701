"""Which run the checkpoints of a folder belong to: two that name one `checkpoint.folder` never mix theirs there.

FOLDER/owner.json      the run that writes here: its identity, its output folder and all its settings

Written when a run starts, wherever the folder is: object stores have no locks. Who finds another run there asks whether
it is the same training, and takes over or is refused. Who trains asks before it publishes a checkpoint, and ends when
another run has taken over."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.memory.folder import identity_of
from cuboid.errors import UserError
from cuboid.readers import parse_json
from cuboid.spec.run import Run, dump_run

FILE = "owner.json"
PROBE = ".writable"
LARGEST = 1 << 20
"""Bytes of a file that may be one."""


@dataclass(frozen=True)
class Owner:
    identity: str
    """As the output folder of the run has it; one that starts anew there has another."""
    folder: str
    """That output folder."""
    host: str
    run: str
    """As a run file has it."""

    @property
    def named(self) -> str:
        return f"the run in {self.folder}" + (f" of host {self.host}" if self.host else "")


def read_owner(folder: Location) -> Owner | None:
    """None: nobody has said that it is theirs."""
    place = folder / FILE
    size = place.size
    if size is None:
        return None
    try:
        if size > LARGEST:
            raise ValueError(f"it has {size} bytes")
        table = parse_json(place.read())
        return Owner(**{name: str(table[name]) for name in Owner.__dataclass_fields__})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place} does not say whose checkpoints these are ({error}); remove it") from None


def own(run: Run, folder: Location) -> None:
    """From now on the folder is this run's. A folder within the run's own needs no word of it, unless somebody else
    has left one."""
    if not run.checkpoint.folder and (folder / FILE).size is None:
        return
    here = Owner(identity_of(run, make=True), os.path.abspath(run.output.folder), socket.gethostname(), dump_run(run))
    _write(folder, FILE, json.dumps(asdict(here)).encode())


def check_writable(run: Run, folder: Location) -> None:
    """Before anything of the run is written, or of an earlier one removed. A folder within the run's own is made with
    it, unless something is there already."""
    if run.checkpoint.folder or (run.checkpoint.every and os.path.lexists(folder.path)):
        if (folder / FILE).size is None and FILE in folder.names():
            raise UserError(f"checkpoint.folder={folder} cannot be written: its {FILE} is no file; remove it")
        _write(folder, PROBE, b"")
        (folder / PROBE).remove()


def _write(folder: Location, name: str, content: bytes) -> None:
    try:
        folder.make_folder()
        (folder / name).write_durably(content)
    except Exception as error:  # every driver of a store fails in its own way
        why = getattr(error, "strerror", None) or error
        raise UserError(f"checkpoint.folder={folder} cannot be written: {why}; use another folder") from None


class Ownership:
    """In rank 0: whether the folder is still its run's."""

    def __init__(self, run: Run, folder: Location) -> None:
        self._identity, self._folder = identity_of(run), folder

    def check(self) -> None:
        owner = read_owner(self._folder) if self._identity else None
        if owner is not None and owner.identity != self._identity:
            raise UserError(
                f"checkpoint.folder={self._folder} was taken over by {owner.named}: this run ends, and its checkpoints "
                "do not mix with those; use another checkpoint.folder for one of them"
            )
