"""The stacks of ranks that hang: each writes its own when it is sent a signal, also from within a C function."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cuboid.resilience.diagnosis import STOPPED, where
from cuboid.telemetry.heartbeat_reader import Reading

SIGNAL = signal.SIGUSR2
PATIENCE = 3.0
"""Seconds in which ranks write their stacks."""
SETTLED = 0.2
"""Seconds after which a file that did not grow is whole."""


def stack_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"stack-{rank:05d}.txt"


def offer_stack(folder: str | Path, rank: int) -> None:
    """Called by a rank as it begins."""
    file = stack_path(folder, rank).open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


COMPILING = ("_dynamo/convert_frame.py", "in compile_fx_inner", "_inductor/async_compile.py", "/triton/compiler/")
"""What stands in a stack while PyTorch compiles, and not while what it compiled runs."""


def is_compiling(reading: Reading, folder: str | Path) -> bool:
    """Whether a thread of this rank compiles just now."""
    path = stack_path(folder, reading.rank)
    before = _size(path)
    _ask([reading], folder)
    stacks = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
    return any(mark in stacks for mark in COMPILING)


def collect_stacks(readings: Sequence[Reading], folder: str | Path, target: Path) -> None:
    """One text per rank in `target`: what it noted last, its process, and the stacks of all its threads."""
    _ask([reading for reading in readings if reading.pid and reading.state not in STOPPED], folder)
    for reading in readings:
        path = stack_path(folder, reading.rank)
        stacks = path.read_text() if path.exists() else ""
        text = f"rank {reading.rank}, process {reading.pid}: {where(reading)}\n{_process(reading)}\n\n{stacks}"
        (target / f"rank-{reading.rank:05d}.txt").write_text(text)


def _ask(readings: Sequence[Reading], folder: str | Path) -> None:
    """Returns when all have written their stacks and no file grows, or nobody waits any longer."""
    paths = [stack_path(folder, reading.rank) for reading in readings]
    written = [_size(path) for path in paths]
    for reading in readings:
        with suppress(ProcessLookupError):
            os.kill(reading.pid, SIGNAL)
    until = time.monotonic() + PATIENCE
    sizes: list[int] = []
    while time.monotonic() < until:
        before, sizes = sizes, [_size(path) for path in paths]
        if sizes == before and all(now > then for now, then in zip(sizes, written, strict=True)):
            return
        time.sleep(SETTLED)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _process(reading: Reading) -> str:
    """What the kernel tells of a process; of a stopped one there is no more."""
    lines = [f"state {reading.state or 'gone'}"]
    for name in ("wchan", "syscall"):
        with suppress(OSError):
            lines.append(f"{name} {Path(f'/proc/{reading.pid}/{name}').read_text().strip()}")
    if reading.state in STOPPED:
        lines.append("it is stopped and cannot write its stacks")
    return "\n".join(lines)
