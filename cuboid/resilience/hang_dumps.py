"""What is kept of ranks that hang: the stacks of each, and the latest collectives of NCCL's flight recorder."""

from __future__ import annotations

import ast
import faulthandler
import os
import pickle
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cuboid.resilience.diagnosis import STOPPED, spans, where
from cuboid.telemetry.heartbeat import Reading

# The stacks of ranks that hang: each writes its own when it is sent a signal, also from within a C function.


SIGNAL = signal.SIGUSR2
STACK_PATIENCE = 3.0
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
    _ask_for_stacks([reading], folder)
    stacks = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
    return any(mark in stacks for mark in COMPILING)


def collect_stacks(readings: Sequence[Reading], folder: str | Path, target: Path) -> None:
    """One text per rank in `target`: what it noted last, its process, and the stacks of all its threads."""
    _ask_for_stacks([reading for reading in readings if reading.pid and reading.state not in STOPPED], folder)
    for reading in readings:
        path = stack_path(folder, reading.rank)
        stacks = path.read_text() if path.exists() else ""
        text = f"rank {reading.rank}, process {reading.pid}: {where(reading)}\n{_process(reading)}\n\n{stacks}"
        (target / f"rank-{reading.rank:05d}.txt").write_text(text)


def _ask_for_stacks(readings: Sequence[Reading], folder: str | Path) -> None:
    """Returns when all have written their stacks and no file grows, or nobody waits any longer."""
    paths = [stack_path(folder, reading.rank) for reading in readings]
    written = [_size(path) for path in paths]
    for reading in readings:
        with suppress(ProcessLookupError):
            os.kill(reading.pid, SIGNAL)
    until = time.monotonic() + STACK_PATIENCE
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


# PyTorch's flight recorder: the latest collectives of each rank over NCCL, kept in the run's folder when it hangs.
#
# A rank makes a pipe, and writes its record when something is written to that: also while its main thread hangs, and
# before anything is ended. `torchfrtrace --prefix flight- RUN/hang-00001` (`python -m
# torch.distributed.flight_recorder.fr_trace`) compares the records of all ranks.


RECORD_NAME = "flight-"
"""What the names of records and pipes begin with; the rank follows."""
RECORD_PATIENCE = 6.0
"""Seconds in which ranks write their records: they look at their pipes once a second."""
RECORD_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Each variable has a newer and an older name, of which PyTorch takes the newer."""
ENTRIES = "2000"


def offer_record(folder: str | Path, heartbeats: str | Path | None, torch_version: str) -> None:
    """Called by a rank before it makes its first group. What the user has set stays. `heartbeats`: where the supervisor
    looks for the pipes; None: nobody does, and PyTorch writes the record only when a collective times out."""
    if not any(name in os.environ for name in RECORD_FILES):
        os.environ[RECORD_FILES[0]] = str(Path(folder).absolute() / RECORD_NAME)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # else it looks at the pipe every few minutes
    if heartbeats is not None:
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(Path(heartbeats) / RECORD_NAME))
    # From 2.13 on it records by itself; before, the pipe is made only under this older name.
    if tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 13):
        os.environ.setdefault(SIZES[1], os.environ.get(SIZES[0], ENTRIES))


class Recorders:
    """Of the ranks of this machine."""

    def __init__(self, readings: Sequence[Reading], folder: Path, heartbeats: Path) -> None:
        """Asks every rank that has a pipe to write its record."""
        chosen = next((os.environ[name] for name in RECORD_FILES if name in os.environ), "")
        self._moves = not chosen
        self._prefix = chosen or str(folder.absolute() / RECORD_NAME)
        pipes = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(heartbeats / RECORD_NAME))
        known = {reading.rank: _changed(self._path(reading.rank)) for reading in readings}
        self._asked = {
            reading.rank: known[reading.rank]
            for reading in readings
            if reading.state not in STOPPED and _ask_for_record(Path(f"{pipes}{reading.rank}.pipe"))
        }
        """Rank -> when a record that was there before was written, or 0."""

    def _path(self, rank: int) -> Path:
        return Path(f"{self._prefix}{rank}")

    def collect(self, target: Path) -> dict[int, Path]:
        """Rank -> its record, when all have written theirs or nobody waits any longer. Records in the run's own folder
        are moved to `target`."""
        found: dict[int, Path] = {}
        sizes: dict[int, int] = {}
        until = time.monotonic() + (RECORD_PATIENCE if self._asked else 0)
        while len(found) < len(self._asked) and time.monotonic() < until:
            for rank, old in self._asked.items():
                path = self._path(rank)
                if rank not in found and _changed(path) != old:
                    before, sizes[rank] = sizes.get(rank, 0), path.stat().st_size
                    if 0 < sizes[rank] == before:
                        found[rank] = path
            time.sleep(0.2)
        if self._moves:
            for rank, path in found.items():
                found[rank] = Path(shutil.move(path, target / path.name))
        return found


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _ask_for_record(pipe: Path) -> bool:
    with suppress(OSError):  # there is none over gloo, or nobody reads it any more
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"1")
            return True
        finally:
            os.close(handle)
    return False


@dataclass(frozen=True)
class Open:
    """The oldest collective that a rank began and its device has not ended."""

    name: str
    number: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.number}" + (f" of ranks {spans(self.ranks)}" if self.ranks else "")


def oldest_open(path: Path) -> Open | None:
    """None: all have ended, or the record tells nothing."""
    try:
        with path.open("rb") as file:
            record = _Plain(file).load()
        groups = record.get("pg_config", {})
        for entry in record["entries"]:
            if entry["state"] != "completed":
                number = entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]
                return Open(str(entry["profiling_name"]), int(number), _ranks(groups, entry["process_group"]))
    except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, pickle.UnpicklingError):
        pass
    return None


def _ranks(groups: Mapping[str, Any], group: Sequence[str]) -> tuple[int, ...]:
    with suppress(KeyError, ValueError, SyntaxError, TypeError):
        told = groups[group[0]]["ranks"]
        return tuple(ast.literal_eval(told) if isinstance(told, str) else told)
    return ()


class _Plain(pickle.Unpickler):
    """A record is made of plain values; whatever else a file may hold is not made."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"a record names {module_name}.{global_name}")


def tell_open(found: Mapping[int, Open]) -> str:
    """For the sentence of a hang: which collective each rank's device is in, ranks in the same together."""
    groups: dict[str, list[int]] = {}
    for rank, each in sorted(found.items()):
        groups.setdefault(str(each), []).append(rank)
    texts = [f"rank{'' if len(ranks) == 1 else 's'} {spans(ranks)} in {what}" for what, ranks in groups.items()]
    return "not ended on the device: " + ", ".join(texts) if texts else ""
