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
from cuboid.resilience.reading import Reading

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


def collect_stacks(readings: Sequence[Reading], folder: str | Path, target: Path) -> None:
    """One text per rank in `target`: what it noted last, its process, and the stacks of all its threads."""
    asked = [reading for reading in readings if reading.pid and reading.state not in STOPPED]
    for reading in asked:
        with suppress(ProcessLookupError):
            os.kill(reading.pid, SIGNAL)
    _settle([stack_path(folder, reading.rank) for reading in asked])
    for reading in readings:
        path = stack_path(folder, reading.rank)
        stacks = path.read_text() if path.exists() else ""
        text = f"rank {reading.rank}, process {reading.pid}: {where(reading)}\n{_process(reading)}\n\n{stacks}"
        (target / f"rank-{reading.rank:05d}.txt").write_text(text)


def _settle(paths: Sequence[Path]) -> None:
    """Until all have written and none grows."""
    until = time.monotonic() + PATIENCE
    sizes: list[int] = []
    while time.monotonic() < until:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in paths]
        if sizes and all(sizes) and sizes == before:
            return
        time.sleep(SETTLED)


def _process(reading: Reading) -> str:
    """What the kernel tells of a process; of a stopped one there is no more."""
    lines = [f"state {reading.state or 'gone'}"]
    for name in ("wchan", "syscall"):
        with suppress(OSError):
            lines.append(f"{name} {Path(f'/proc/{reading.pid}/{name}').read_text().strip()}")
    if reading.state in STOPPED:
        lines.append("it is stopped and cannot write its stacks")
    return "\n".join(lines)
