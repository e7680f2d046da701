"""Names in shared memory that tell whose they are, so that what killed runs leave there is cleared at the next start.

/dev/shm/cuboid-heartbeats-1000-4026531836-4711-…    kind, user, namespace of processes, process, and what it likes
/dev/shm/sem.cuboid-semaphore-1000-4026531836-4711-…

Containers may have one /dev/shm and processes of their own: a process that seems dead lives in another namespace. So
nobody clears what is of another user or another namespace."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from cuboid.errors import UserError

MEMORY = "/dev/shm"
KINDS = ("heartbeats", "slots", "semaphore")
OURS = re.compile(rf"(sem\.)?cuboid-({'|'.join(KINDS)})-(\d+)-(\d+)-(\d+)-.*")


def memory_folder() -> str:
    """A folder that is never written to a disk, if there is one."""
    return MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir()


def prefix_of(kind: str, process: int = 0) -> str:
    """How the name of something begins that belongs to a process, by default this one."""
    assert kind in KINDS
    return f"cuboid-{kind}-{os.getuid()}-{_namespace()}-{process or os.getpid()}-"


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no Linux, and no namespaces
        return 0


def name_semaphores() -> None:
    """Of those that multiprocessing makes for this process and those it starts. Its tracker removes them, unless it is
    killed too. Python has no public way to name them; where it changes this one they keep the names they had."""
    config = getattr(multiprocessing.current_process(), "_config", {})
    if "semprefix" in config and os.path.isdir(MEMORY):
        config["semprefix"] = f"/{prefix_of('semaphore').removesuffix('-')}"


LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes of the name of a folder where multiprocessing can make its sockets."""
SHORT = ("/tmp", MEMORY, "/var/tmp")
"""Folders whose names are shorter, on most machines."""


def place_sockets() -> None:
    """Those of multiprocessing, which go where temporary files do. Some schedulers' TMPDIR is too long for the address
    of a socket."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_FOLDER:
        return
    others = [folder for folder in SHORT if os.access(folder, os.W_OK | os.X_OK)]
    if not others:
        raise UserError(
            f"TMPDIR={usual} is too long a name for sockets; use one of {LONGEST_FOLDER} characters or fewer"
        )
    tempfile.tempdir = others[0]
    try:
        multiprocessing.util.get_temp_dir()  # which is kept
    finally:
        tempfile.tempdir = usual


def sweep() -> None:
    """Remove what dead processes of this user and this namespace have left."""
    for folder in {MEMORY, tempfile.gettempdir()}:
        for path in Path(folder).glob("*cuboid-*"):
            found = OURS.fullmatch(path.name)
            if found is None or (int(found[3]), int(found[4])) != (os.getuid(), _namespace()):
                continue
            with suppress(OSError):
                if path.lstat().st_uid != os.getuid() or _lives(int(found[5])):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
