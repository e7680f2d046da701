"""One file of a folder broken: its content by `junk.py`, or something in its place that is no such file; for
`bad_input.py`."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from junk import FORMATS, HUGE, format_of

from cuboid.checkpoint.manifest import checksum_of_bytes


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # its address is short
        made.bind(path.name)
        os.chdir(here)


PLACED: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "dangling": lambda path: path.symlink_to("nothing"),
    "loop": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.write_bytes(b""),
    "blank": lambda path: path.write_bytes(b" \n\n"),
    "holes": lambda path: (path.touch(), os.truncate(path, HUGE)),
    "terabytes": lambda path: (path.touch(), os.truncate(path, HUGE << 9)),
    "unreadable": lambda path: (path.write_bytes(b"{}"), path.chmod(0)),
    "itself": lambda path: path.symlink_to("."),
    "above": lambda path: path.symlink_to("../.."),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "endless": lambda path: path.symlink_to("/proc/kmsg"),
    "utf16": lambda path: path.write_text("model = 'tiny-llama'\n{}\n", encoding="utf-16"),
    "missing": lambda path: None,
    "noise": lambda path: path.write_bytes(Random(str(path.name)).randbytes(5000)),
    "digits": lambda path: path.write_text("9" * 100_000),
    "brackets": lambda path: path.write_text("[" * 1_000_000),
    "line": lambda path: path.write_bytes(b"a" * (50 << 20)),
}


def _content(path: Path) -> bytes:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > 64 << 20:
        raise ValueError(path)
    return path.read_bytes()


def seal(folder: Path) -> None:
    """Makes the manifest of a checkpoint or a store agree with its files and with itself, as somebody would who means
    harm: what is wrong then is not only a checksum. A folder with what is no file, or is huge, stays."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        place = folder / "manifest.json"
        table = json.loads(_content(place))
        for name, facts in table["files"].items():
            content = _content(folder / name)
            if "sha256" in facts:
                facts.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
            else:
                facts.update(bytes=len(content), checksum=checksum_of_bytes(content))
        if table.pop("checksum", None):
            table["checksum"] = checksum_of_bytes(json.dumps(table).encode())
        place.write_text(json.dumps(table, indent=1))


def damage(path: Path, random: Random) -> str:
    """Breaks one file; what was done to it, in a word or two."""
    what = _damage(path, random)
    if (path.parent / "manifest.json").is_file() and random.random() < 0.5:
        seal(path.parent)
        return f"{what}, sealed"
    return what


def _damage(path: Path, random: Random) -> str:
    if random.random() < 0.25:
        name = random.choice(list(PLACED))
        path.unlink()
        PLACED[name](path)
        return name
    content, kind = path.read_bytes(), format_of(path)
    if random.random() < 0.3:
        kind = "bytes"
    path.write_bytes(FORMATS[kind](content, random))
    return kind
