"""Where a node keeps its part of a run's state in memory: a folder on a memory file system, which outlives processes.

/dev/shm/cuboid-1000-3f2a…/      one per user, run folder and node; nobody else may look into it
  9d41…/                         one per run: what an earlier one in the same folder left is never looked at
    step-00000120/               as on disk, but with this node's files and its copies of another's alone, and index
                                 and manifest of these
    .slot-0/                     the one being written
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.checkpoint.location import Location, locate
from cuboid.errors import UserError
from cuboid.readers import Missing, read_text
from cuboid.spec.run import Run

NODE = "CUBOID_NODE"
"""Variable with this node's name, for who starts several on one machine; else the machine's own."""
IDENTITY = "identity"
"""File in the run's folder that tells this run from any other that was, or will be, there."""
GENERATIONS = 2
"""The last whole one, and the one being written."""


def node_name() -> str:
    return os.environ.get(NODE) or socket.gethostname()


def identity_of(run: Run, make: bool = False) -> str:
    """Empty if the run has none; `make`: give it one then."""
    path = Path(run.output.folder) / IDENTITY
    with suppress(Missing):
        if known := read_text(path, 4096).strip():
            if re.fullmatch("[0-9a-f]{8,64}", known) is None:  # it names a folder
                raise UserError(f"{path} does not say which run this is; remove it")
            return known
    if not make:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_identity(run, secrets.token_hex(8))
    return read_text(path, 4096).strip()


def write_identity(run: Run, identity: str) -> None:
    path = Path(run.output.folder) / IDENTITY
    aside = path.with_name(f".{IDENTITY}.writing")
    try:
        aside.write_text(identity + "\n")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def node_folder(run: Run, node: str = "") -> Path:
    where = "\0".join((os.path.abspath(run.output.folder), node or node_name()))
    name = f"cuboid-{os.getuid()}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"
    return Path(run.checkpoint.memory_folder) / name


def open_folder(run: Run, identity: str, node: str = "") -> Location:
    """This node's folder for this run, made if need be. Others may write beside it, so it is believed only if it is
    ours."""
    folder = node_folder(run, node)
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise UserError(f"{folder} is not a folder of this user alone; remove it, or use checkpoint.memory_every=0")
        (folder / identity).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"checkpoint.memory_folder={run.checkpoint.memory_folder} cannot be written: {error.strerror}; use "
            f"a folder on a memory file system such as /dev/shm, or checkpoint.memory_every=0"
        ) from None
    return locate(folder / identity)


def newest_in_memory(run: Run) -> int:
    """The step of the newest state this node has published; 0 if there is none."""
    identity = identity_of(run)
    if not run.checkpoint.memory_every or not identity:
        return 0
    return max((step_of(path) for path in checkpoints(locate(node_folder(run) / identity))), default=0)


def sweep_all_but(folder: Location, steps: Iterable[int]) -> None:
    """Leave these steps of this run, and nothing of any other; only while no rank of this node writes here."""
    kept = {f"step-{step:08d}" for step in steps}
    for other in folder.parent.names():
        if other != folder.name:
            (folder.parent / other).remove()
    for name in folder.names():
        if name not in kept:
            (folder / name).remove()


def forget(run: Run) -> None:
    """Give back all that this node keeps for whatever run is, or was, in the run's folder."""
    locate(node_folder(run)).remove()


def bytes_per_node(run: Run, nodes: int) -> int:
    """Host memory that a node needs: parameters and both moments, its part of them and its copy of another's."""
    state = 3 * (8 if run.training.precision == "float64" else 4) * run.model.parameters
    return GENERATIONS * (2 if nodes > 1 else 1) * -(-state // nodes)


def check_room(run: Run, nodes: int) -> None:
    """Refuse what this node has no memory for, before anything starts."""
    spec = run.checkpoint
    if not spec.memory_every:
        return
    place = Path(spec.memory_folder)
    if not place.is_dir():
        raise UserError(
            f"checkpoint.memory_folder={spec.memory_folder} is no folder; use one on a memory file system such as "
            f"/dev/shm, or checkpoint.memory_every=0"
        )
    facts, held = os.statvfs(place), node_folder(run)
    room = facts.f_bavail * facts.f_frsize
    room += sum(path.stat().st_blocks * 512 for path in held.rglob("*") if path.is_file()) if held.is_dir() else 0
    if (need := bytes_per_node(run, nodes)) > room:
        raise UserError(
            f"checkpoint.memory_every={spec.memory_every} needs {need / 1e9:.3g} GB in checkpoint.memory_folder="
            f"{spec.memory_folder}, where {room / 1e9:.3g} GB are free; use checkpoint.memory_every=0, more nodes, or "
            f"a memory file system with more room"
        )
