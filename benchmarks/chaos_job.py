"""A training that faults are done to: its processes, its rows, its disk and its clock. Used by `chaos.py`."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

LIMIT = 900.0
"""Seconds a job may take, all its recoveries included."""
MARK = "CUBOID_CHAOS"
"""A variable whose value tells the processes of one supervisor from all others."""
FIELDS = [
    "training.global_batch=8",
    "training.sequence=16",
    "training.deterministic=true",
    "resilience.hang_floor_seconds=4",
    "resilience.setup_seconds=120",
    "resilience.restarts=20",  # faults come so densely that several may strike between two checkpoints
]
PACE = "slow rank=0 step=1 seconds=0.05 at=data"
"""Steps of a tiny model take milliseconds; so there is time for a fault between two of them."""


@dataclass
class Told:
    """What a job showed."""

    kind: str
    layout: str
    faults: list[str] = field(default_factory=list)
    """Those that struck."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    lost_steps: list[int] = field(default_factory=list)
    """Steps that were done again, of each recovery."""
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    """Kind of a fault, and the seconds from it to the next step that stands."""


def command(layout: str, folder: Path, *fields: str, more: Sequence[str] = ()) -> list[str]:
    settings = [word for setting in (*FIELDS, *fields, f"output.folder={folder}") for word in ("--set", setting)]
    return [sys.executable, "-m", "cuboid.cli.main", "train", "--json", "--layout", layout, *more, *settings]


@contextmanager
def alone_in(lock: Path) -> Iterator[None]:
    """Of jobs beside each other one at a time is inside."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a log that is being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Job:
    """One supervisor, or one for each of several nodes; `starts` starts the one of a number."""

    _numbers = count()

    def __init__(self, folder: Path, log: Path, starts: Callable[[int, dict[str, str]], subprocess.Popen[Any]]) -> None:
        self.folder, self.log, self._starts = folder, log, starts
        self.mark = f"{os.getpid()}-{next(self._numbers)}"
        self.supervisors: dict[int, subprocess.Popen[Any]] = {}
        self.began = time.monotonic()
        self._known: dict[int, int | None] = {}
        self._first_seen: dict[int, float] = {}

    def start(self, number: int = 0) -> None:
        self.supervisors[number] = self._starts(number, {**os.environ, MARK: f"{self.mark}.{number}."})

    def processes(self, number: int | None = None) -> list[int]:
        """All that live, of one supervisor or all of them."""
        here, now = {int(path.name) for path in Path("/proc").glob("[0-9]*")}, time.monotonic()
        for table in (self._known, self._first_seen):
            for gone in set(table) - here:
                del table[gone]  # type: ignore[attr-defined]
        for process in here - set(self._known):
            with suppress(OSError):
                environment = Path(f"/proc/{process}/environ").read_bytes()
                found = environment.partition(f"{MARK}={self.mark}.".encode())[2].partition(b".")[0]
                if found:
                    self._known[process] = int(found)
                # Between its fork and its exec a process has the environment of who starts it.
                elif now - self._first_seen.setdefault(process, now) > 10:
                    self._known[process] = None
        return sorted(
            process for process, found in self._known.items() if found is not None and number in (None, found)
        )

    def ranks(self, number: int | None = None) -> list[int]:
        """Forks of the fork server, a child of the supervisor."""
        parents = {process: parent_of(process) for process in self.processes(number)}
        supervisors = {supervisor.pid for supervisor in self.supervisors.values()}
        return [process for process, parent in parents.items() if parents.get(parent or 0) in supervisors]

    def kill(self, number: int) -> None:
        """The supervisor; its ranks end with it."""
        self.supervisors[number].kill()
        self.supervisors[number].wait()

    @property
    def steps_done(self) -> int:
        found = rows(self.folder / "metrics.jsonl")
        return int(found[-1]["step"]) if found else 0

    @property
    def failures(self) -> list[dict[str, Any]]:
        return rows(self.folder / "failures.jsonl")

    @property
    def ended(self) -> bool:
        return any(supervisor.poll() is not None for supervisor in self.supervisors.values())

    def wait_until(self, happened: Callable[[], object], limit: float = LIMIT) -> bool:
        """False: the job ended, or the time is over."""
        until = time.monotonic() + limit
        while not happened():
            if self.ended or time.monotonic() > until:
                return False
            time.sleep(0.03)
        return True

    def finish(self, told: Told, code: int = 0) -> None:
        """Wait until all have ended, with this exit code."""
        for supervisor in self.supervisors.values():
            try:
                found = supervisor.wait(max(1.0, LIMIT - (time.monotonic() - self.began)))
                if found != code:
                    said = (self.log.read_text().strip().splitlines() or [""])[-1][:300]
                    told.problems.append(f"exit code {found}: {said}")
            except subprocess.TimeoutExpired:
                told.problems.append(f"not over after {LIMIT:g} s; it is ended, its log is {self.log}")
                self.end()
        told.seconds = time.monotonic() - self.began
        until = time.monotonic() + 30
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)
        if self.processes():
            told.problems.append(f"{len(self.processes())} processes outlive it")
            self.end()

    def end(self) -> None:
        for process in self.processes():
            send(process, signal.SIGKILL)
        for supervisor in self.supervisors.values():
            supervisor.kill()
            supervisor.wait()


def parent_of(process: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def send(process: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, what)


class WriterWatch(threading.Thread):
    """Looks all the time who has the rows of a run open for writing: at most one process ever."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self._job, self._over = job, threading.Event()
        self._seen, self._two = False, list[str]()
        self.start()

    def run(self) -> None:
        path = f"{self._job.folder.resolve()}/metrics.jsonl"
        while not self._over.wait(0.2):
            writers = [process for process in self._job.processes() if _writes(process, path)]
            self._seen = self._seen or bool(writers)
            # Looked at again: meanwhile one of them may have replaced the file of another, which stands still or dies.
            if len(writers) > 1 and sum(_writes(process, path) for process in writers) > 1:
                self._two.append(f"processes {writers} write {path} at once")

    def end(self) -> list[str]:
        """What was wrong."""
        self._over.set()
        self.join()
        return self._two[:1] if self._seen else ["nobody was ever seen to write the rows"]


def _writes(process: int, path: str) -> bool:
    """A file that another has replaced has `(deleted)` behind its name: who still writes there harms nobody."""
    with suppress(OSError):
        for handle in os.scandir(f"/proc/{process}/fd"):
            with suppress(OSError):
                if os.readlink(handle.path) == path:
                    flags = Path(f"/proc/{process}/fdinfo/{handle.name}").read_text().partition("flags:")[2].split()[0]
                    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


class Disk:
    """A file system of its own, in a file: it can be full, and it can stand still, both as real ones do."""

    def __init__(self, folder: Path, megabytes: int = 48) -> None:
        self.folder, self._image = folder, folder.with_suffix(".image")
        folder.mkdir()
        with self._image.open("wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(folder))

    def fill(self) -> None:
        """To the last block."""
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            size = 1 << 20
            while size >= 512:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self) -> None:
        (self.folder / "ballast").unlink()

    def stand_still(self, seconds: float) -> None:
        """Whoever writes, or syncs, waits in the kernel, where no signal reaches it."""
        _run("fsfreeze", "--freeze", str(self.folder))
        try:
            time.sleep(seconds)
        finally:
            _run("fsfreeze", "--unfreeze", str(self.folder))

    def close(self) -> None:
        _run("umount", "--lazy", str(self.folder))
        self._image.unlink()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@cache
def why_no_disks() -> str:
    """Why none can be made here; nothing if they can. Tried, because kernels and containers may refuse any of it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))):
        return "disks need root, mkfs.ext4, mount and fsfreeze"
    with tempfile.TemporaryDirectory(prefix="cuboid-disk-") as folder:
        try:
            disk = Disk(Path(folder) / "disk", megabytes=8)
            try:
                disk.stand_still(0.01)
            finally:
                disk.close()
        except subprocess.CalledProcessError as error:
            return f"no disk can be made: {error.cmd[0]} says {(error.stderr or '').strip()}"
    return ""


class Clock:
    """The wall clock of the processes that are given `environment`: they see it jump, in Python, in C++ and in waits
    until a time of day. What counts seconds is left alone, and so is the clock of the machine, which has other work."""

    def __init__(self, file: Path) -> None:
        library = file.with_name("clock.so")
        with alone_in(file.with_name("clock.lock")):  # of jobs beside each other one makes it
            if not library.exists():
                words = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
                subprocess.run(words, input=_CLOCK, check=True, capture_output=True, text=True)
        self._file = file
        file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CUBOID_CHAOS_CLOCK": str(file)}

    def jump(self, draw: random.Random) -> float:
        seconds = draw.choice([-1, 1]) * draw.choice([30, 3600, 30 * 86400])
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", seconds))
        return float(seconds)


@cache
def why_no_clocks() -> str:
    """Why no clock can be moved here; nothing if one can. Tried: a Python may not ask the library for the time."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return "clocks need Linux and a C compiler"
    with tempfile.TemporaryDirectory(prefix="cuboid-clock-") as folder:
        try:
            clock = Clock(Path(folder) / "clock")
        except subprocess.CalledProcessError as error:
            return f"no clock can be made: {error.cmd[0]} says {(error.stderr or '').strip()[:200]}"
        seconds = clock.jump(random.Random(0))
        words = [sys.executable, "-c", "import time; print(time.time())"]
        shown = subprocess.run(words, env={**os.environ, **clock.environment}, capture_output=True, text=True).stdout
    if abs(float(shown or 0) - time.time() - seconds) > 20:
        return "a process does not see its clock jump"
    return ""


# Known monotonic deadlines are small, times of day are not: a wait until one of these is moved back by what the
# process was told too much.
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *shift;
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CUBOID_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) shift = found;
}
static long moved(void) { return shift ? *shift : 0; }
static struct timespec back(const struct timespec *until) {
    struct timespec earlier = *until;
    if (earlier.tv_sec > 1000000000) earlier.tv_sec -= moved();
    return earlier;
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
int clock_gettime(clockid_t id, struct timespec *now) {
    REAL(clock_gettime);
    int failed = real(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += moved();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int failed = real(now, zone);
    if (!failed) now->tv_sec += moved();
    return failed;
}
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    REAL(sem_timedwait);
    struct timespec earlier = back(until);
    return real(semaphore, &earlier);
}
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    REAL(pthread_cond_timedwait);
    struct timespec earlier = back(until);
    return real(condition, mutex, &earlier);
}
"""
