"""A process that cannot harm the machine, whoever runs it: it writes in few places alone, and has no rights of root.

    confine([folder])      # this process and all that it starts, for good

A campaign of bad input runs its commands so, because a junk word may name a file of the system, and root may write it.
Linux's Landlock says where is written (5.13 and later; 6.2 also who truncates)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

CREATE, ADD_RULE, RESTRICT = 444, 445, 446
"""System calls of Landlock, the same on every processor."""
WRITE, TRUNCATE = 1 << 1, 1 << 14
MAKES = sum(1 << bit for bit in range(4, 13))
"""To remove or make anything in a folder."""
REFER = 1 << 13
"""To link or rename from one folder to another."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/shm")
NO_NEW_PRIVILEGES = 38
CAPABILITIES = 0x20080522
"""Version of the structure that capset takes."""


def why_not_confined() -> str:
    """Why this machine cannot; nothing if it can."""
    if ctypes.CDLL(None).syscall(CREATE, None, ctypes.c_size_t(0), 1) < 1:
        return "this kernel has no Landlock, so a bad command could write anywhere"
    return ""


def confine(writable: Sequence[Path]) -> None:
    """What is not there, or not writable already, stays so. `OSError`: it cannot be done."""
    kernel = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> int:
        found: int = getattr(kernel, name)(*arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
        return found

    version = call("syscall", CREATE, None, ctypes.c_size_t(0), 1)
    files = WRITE | (TRUNCATE if version >= 3 else 0)
    handled = files | MAKES | (REFER if version >= 2 else 0)
    rules = call("syscall", CREATE, struct.pack("=Q", handled), ctypes.c_size_t(8), 0)
    for path in (*writable, *map(Path, DEVICES)):
        if path.exists():
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            call("syscall", ADD_RULE, rules, 1, struct.pack("=Qi", handled if path.is_dir() else files, place), 0)
            os.close(place)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("syscall", RESTRICT, rules, 0)
    os.close(rules)
    lose_rights()


def lose_rights() -> None:
    """Those of root: what a mode forbids is forbidden then."""
    if ctypes.CDLL(None).capset(struct.pack("=Ii", CAPABILITIES, 0), bytes(24)) != 0:
        raise OSError("capset: the rights of root cannot be given up")
