"""Which run the checkpoints of a folder belong to: two that name one `checkpoint.folder` never mix theirs there.

FOLDER/owner-00000003-9d41….json    the third owner: its identity, its output folder and all its settings

Claimed when a run starts, wherever the folder is: object stores have no locks, and not all drivers can make a file that
must not be there yet. All that is needed of a store is that who has written a file and then lists the folder sees every
file that was written before. To own a folder is to have written the next number and to have found no other file of that
number, nor a later one, in a list made after. Of two runs that write in the same moment at least one sees the other:
the identity that sorts first waits until the others have withdrawn, and these are refused. Who trains asks before it
publishes a checkpoint, and ends when another run has the newest number."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from cuboid.checkpoint.location import Location
from cuboid.checkpoint.memory.folder import identity_of
from cuboid.errors import UserError
from cuboid.readers import parse_json
from cuboid.spec.run import Run, dump_run

FIRST = "owner.json"
"""The only file there was before owners had numbers; it counts as number 0."""
NAME = re.compile(r"owner-(\d{8,18})-([0-9a-f]{8,64})\.json")
PROBE = ".writable"
LARGEST = 1 << 20
"""Bytes of a file that may be one."""
PATIENCE = 10.0
"""Seconds for which a claim waits for others of the same moment to be withdrawn."""
HALF = 1.0
"""Seconds after which a file that cannot be read is not merely half written."""
LOOK = 0.1
"""Seconds between two looks."""


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


@dataclass(frozen=True)
class Claims:
    """The files of the newest number."""

    number: int = -1
    """-1: nobody has said that the folder is theirs."""
    names: tuple[str, ...] = ()
    """Sorted. The first is the owner's: others are of runs that have yet to withdraw, or were killed before."""


def _number(name: str) -> int:
    found = NAME.fullmatch(name)
    return int(found[1]) if found else 0 if name == FIRST else -1


def _identity(name: str) -> str:
    found = NAME.fullmatch(name)
    return found[2] if found else ""


def newest_claims(folder: Location) -> Claims:
    try:
        numbers = {name: _number(name) for name in folder.names()}
    except OSError as error:
        raise UserError(f"checkpoint.folder={folder} cannot be read: {_why(error)}; use another folder") from None
    newest = max(numbers.values(), default=-1)
    return Claims(newest, tuple(sorted(name for name, number in numbers.items() if number == newest >= 0)))


def look(folder: Location) -> tuple[Claims, Owner | None]:
    """The newest claims, and the owner as they tell it; None: nobody has said that the folder is theirs."""
    until = time.monotonic() + HALF
    while True:
        claims = newest_claims(folder)
        if not claims.names:
            return claims, None
        try:
            return claims, _read(folder / claims.names[0])
        except (ValueError, KeyError, TypeError, OSError) as error:
            if time.monotonic() > until:
                place = folder / claims.names[0]
                raise UserError(f"{place} does not say whose checkpoints these are ({error}); remove it") from None
        time.sleep(LOOK)


def read_owner(folder: Location) -> Owner | None:
    return look(folder)[1]


def _read(place: Location) -> Owner:
    size = place.size
    if size is None:
        raise ValueError("it is no file")
    if size > LARGEST:
        raise ValueError(f"it has {size} bytes")
    table = parse_json(place.read())
    return Owner(**{name: str(table[name]) for name in Owner.__dataclass_fields__})


@dataclass(frozen=True)
class Claim:
    """What a run has written when the folder is its own."""

    folder: Location
    number: int
    identity: str
    was_there: bool
    """Since the run was started before."""

    @property
    def name(self) -> str:
        return f"owner-{self.number:08d}-{self.identity}.json"

    def keep(self) -> None:
        """The run begins: older claims are forgotten."""
        for name in self.folder.names():
            if 0 <= _number(name) < self.number:
                with suppress(OSError):
                    (self.folder / name).remove()

    def withdraw(self) -> None:
        """The run does not begin."""
        if not self.was_there:
            with suppress(OSError):
                (self.folder / self.name).remove()


def own(run: Run, folder: Location, seen: Claims | None = None, anew: bool = False) -> Claim | None:
    """From now on the folder is this run's, unless another was faster, which is refused. A folder within the run's own
    needs no word of it (None), unless somebody else has left one. `seen`: the claims that the run may follow, as it
    found when it asked; default: those there are. `anew`: with a new identity."""
    seen = newest_claims(folder) if seen is None else seen
    if not run.checkpoint.folder and not seen.names:
        return None
    identity = ("" if anew else identity_of(run)) or secrets.token_hex(8)
    claim = Claim(folder, seen.number, identity, True)
    if seen.names != (claim.name,):
        claim = Claim(folder, max(seen.number, 0) + 1, identity, False)
    here = Owner(identity, os.path.abspath(run.output.folder), socket.gethostname(), dump_run(run))
    _write(folder, claim.name, json.dumps(asdict(here)).encode())
    try:
        _wait_for_others(claim)
    except BaseException:
        claim.withdraw()
        raise
    return claim


def _wait_for_others(claim: Claim) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        newest = newest_claims(claim.folder)
        if newest.number == claim.number and (claim.was_there or newest.names == (claim.name,)):
            return
        first = newest.number == claim.number and newest.names[0] == claim.name
        if not first or time.monotonic() > until:
            break
        time.sleep(LOOK)
    other = next((name for name in newest.names if name != claim.name), "")
    owner = ""
    with suppress(ValueError, KeyError, TypeError, OSError):
        owner = f" by {_read(claim.folder / other).named}"
    raise UserError(
        f"checkpoint.folder={claim.folder} was claimed{owner} in the same moment; use another checkpoint.folder for "
        "one of them"
    )


def check_writable(run: Run, folder: Location) -> None:
    """Before anything of the run is written, or of an earlier one removed. A folder within the run's own is made with
    it, unless something is there already."""
    if run.checkpoint.folder or (run.checkpoint.every and os.path.lexists(folder.path)):
        probe = f"{PROBE}-{secrets.token_hex(4)}"
        _write(folder, probe, b"")
        (folder / probe).remove()


def _write(folder: Location, name: str, content: bytes) -> None:
    """Where files can be renamed nobody reads half of it."""
    aside = folder / f".{name}.writing" if folder.files.renames else folder / name
    try:
        folder.make_folder()
        aside.write_durably(content)
        if aside.name != name:
            aside.rename(folder / name)
    except Exception as error:  # every driver of a store fails in its own way
        with suppress(Exception):
            aside.remove()
        raise UserError(f"checkpoint.folder={folder} cannot be written: {_why(error)}; use another folder") from None


def _why(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


class Ownership:
    """In rank 0: whether the folder is still its run's."""

    def __init__(self, run: Run, folder: Location) -> None:
        self._identity, self._folder = identity_of(run), folder

    def check(self) -> None:
        claims = newest_claims(self._folder)
        if not claims.names or any(_identity(name) == self._identity for name in claims.names):
            return
        owner = read_owner(self._folder)
        if owner is not None and owner.identity != self._identity:
            raise UserError(
                f"checkpoint.folder={self._folder} was taken over by {owner.named}: this run ends, and its checkpoints "
                "do not mix with those; use another checkpoint.folder for one of them"
            )
