"""Watches the watchdog where it is a thread of a rank: under torchrun or srun, in the first rank of each node.

Whoever stops that rank (SIGSTOP), or a call of C in it that never gives back Python's lock, stops the watchdog too, and
the job would stand for ever. So that rank starts a process of its own for this, which needs nothing of the rank but two
files of its heartbeats' folder: the watchdog raises a number in one at every look, the rank in the other at every note.

Only looks at which neither number has risen count, not the time between them: who was suspended with the whole machine,
or set to another time, has not looked. The process ends with the rank, however that one ends. It imports no torch, so
that it starts before the rank has joined the others, and takes few megabytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cuboid.telemetry.heartbeat import CHANGES, PHASE, PHASES, SIZE, STEP, heartbeat_path, process_state

TICK = 0.5
"""Seconds between two looks: so few take so little of a core that nobody holds them for work of the rank."""
FILE = "watchdog"
ENDING = 60.0
"""Seconds more for a watchdog that asks other nodes and collects stacks, before it ends the ranks itself."""
PRINTING = 2.0
"""Seconds in which a launcher must take a sentence; one that reads nothing keeps no rank alive."""
UNHEARD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""What terminals and schedulers send to all processes of a job is for the rank to answer."""
OF_A_RANK = re.compile("RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|PMI|CUBOID_")
"""Variables by which a process could be taken for a rank."""


class Looks:
    """The watchdog's own number, and for how many seconds beyond the limit it and its rank may be silent now."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), 16)
        self._number = 0

    def count(self, more: float = 0.0) -> None:
        self._number += 1
        struct.pack_into("=qd", self._words, 0, self._number, more)


@contextmanager
def second_watch(folder: Path, rank: int, floor: float, setup: float) -> Iterator[None]:
    """Around a rank that is this process, in whose `folder` a `Looks` was made. `floor`, `setup`: how many seconds it
    may be silent, in its steps and while it sets up; 0: for ever."""
    import cuboid

    words = [sys.executable, "-S", "-m", __name__, folder, rank, os.getpid(), floor, setup]
    kept = {name: value for name, value in os.environ.items() if not OF_A_RANK.match(name)}
    # Of what is installed it needs nothing else, and what lies in the folder where the job was started is not for it.
    kept |= {"PYTHONPATH": str(Path(cuboid.__file__).parents[1]), "PYTHONSAFEPATH": "1"}
    process = None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)  # which it inherits
    try:
        nothing = subprocess.DEVNULL
        process = subprocess.Popen([str(word) for word in words], stdin=nothing, stdout=nothing, env=kept)
    except OSError as error:
        print(f"warning: nobody watches the watchdog of rank {rank}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


# What the process does.


class Watched:
    """The rank: its parent, whose number nobody else can get while it is that."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        with suppress(AttributeError):  # on other systems than Linux
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when this process is stopped
        with suppress(AttributeError, OSError):
            self._handle = os.pidfd_open(pid)
        # Asked after both: what was opened is the rank, and not whoever has its number since.

    def lives(self) -> bool:
        return os.getppid() == self._pid

    def wait(self, seconds: float) -> None:
        """Less if it ends."""
        if self._handle is None:
            time.sleep(seconds)
        else:
            select.select([self._handle], [], [], seconds)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.lives():
                os.kill(self._pid, signal.SIGKILL)


def watch(folder: Path, rank: int, watched: Watched, floor: float, setup: float) -> None:
    """Until the rank ends, or is ended."""
    told, words = _mapped(folder / FILE, 16), memoryview(_mapped(heartbeat_path(folder, rank), SIZE)).cast("q")
    seen, silent = (-1, -1), 0
    while watched.lives():
        looks, more = struct.unpack_from("=qd", told)
        phase, now = PHASES[words[PHASE]], (looks, words[CHANGES])
        silent = silent + 1 if now == seen else 0
        seen = now
        limit, field = (setup, "setup_seconds") if phase == "set-up" else (floor, "hang_floor_seconds")
        if limit and silent * TICK >= limit + more:
            state = process_state(os.getppid())
            verb = "is stopped by a signal" if state in ("T", "t") else "hangs"
            place = "while it sets up" if phase == "set-up" else f"in step {words[STEP]}"
            _say(
                f"error: rank {rank} {verb} {place}, and the watchdog of this node with it; silent for "
                f"{silent * TICK:.1f} s, limit {limit + more:.1f} s (resilience.{field}={limit:g})"
            )
            watched.end()
            return
        watched.wait(TICK)


def _mapped(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _say(sentence: str) -> None:
    printing = threading.Thread(target=lambda: print(sentence, file=sys.stderr, flush=True), daemon=True)
    printing.start()
    printing.join(PRINTING)


if __name__ == "__main__":
    with suppress(FileNotFoundError):  # the rank has ended, and its folder is removed
        place, number, parent, *limits = sys.argv[1:]
        watch(Path(place), int(number), Watched(int(parent)), *map(float, limits))
    os._exit(0)  # whatever still prints
