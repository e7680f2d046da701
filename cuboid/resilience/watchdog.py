"""Watches the ranks of this machine during one attempt, from a thread of their supervisor, and ends them when they
hang."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import psutil

from cuboid.errors import HangError, UserError
from cuboid.resilience.diagnosis import GONE, NOT_BEGUN, Diagnosis, diagnose
from cuboid.resilience.goodput import Attempt, note_attempt
from cuboid.resilience.hang_dumps import Open, Recorders, collect_stacks, is_compiling, oldest_open, tell_open
from cuboid.resilience.rebalance import Pace
from cuboid.resilience.second_watch import ENDING, Looks
from cuboid.resilience.standstill import Limit, Silence, Standstill, limit_of, limit_of_all
from cuboid.resilience.stragglers import Stragglers
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import (
    CHANGES,
    DEVICE_PASSED,
    PID,
    SIZE,
    STEP,
    VERSION,
    Reading,
    heartbeat_path,
    ranks_in,
    read_heartbeat,
)
from cuboid.telemetry.shared_memory import memory_folder, prefix_of, sweep

BEGAN = Attempt(time.time(), time.time())
"""When this command began, or near enough."""
TICK = 0.2
"""Seconds between two looks at the heartbeats."""
REPORTS = "hang-*"


@dataclass(frozen=True)
class Hang:
    culprits: tuple[int, ...]
    sentence: str


class Watchdog:
    """Used in a `with` statement around an attempt; ranks write their heartbeats into `folder`."""

    def __init__(
        self,
        run: Run,
        ranks: Sequence[int] | int,
        judge: Callable[[list[Reading]], Diagnosis] = diagnose,
        everywhere: Callable[[bool], bool] = bool,
        folder: Path | None = None,
        announce: Callable[[str], None] | None = None,
        told: Callable[[Pace], None] | None = None,
        looks: Looks | None = None,
    ) -> None:
        """`ranks`: their numbers, or how many will show themselves in `folder`. `judge`: who holds up the job, by the
        readings of this machine and those of other nodes. `everywhere`: tells them whether all ranks here stand still,
        and returns whether those of all nodes do. `folder`: where ranks that somebody else started write their
        heartbeats. `announce`: told who hangs before all ranks are ended. `told`: hears what the steps of the ranks
        here are made of. `looks`: by which another process sees that this one still looks."""
        self._run, self._given, self._announce, self._told = run, folder, announce, told
        self._looks = looks
        self._ranks, self._all = ((), ranks) if isinstance(ranks, int) else (ranks, len(ranks))
        self._judge = judge
        self._standstill = Standstill(run.resilience, everywhere, lambda reading: is_compiling(reading, self.folder))
        self._words: dict[int, memoryview[int]] = {}
        self._waited_for_a_core: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.folder = Path()
        self._began_with_folder = Path(run.output.folder).is_dir()
        self.hang: Hang | None = None

    def __enter__(self) -> Watchdog:
        sweep()
        self.folder = self._given or Path(tempfile.mkdtemp(prefix=prefix_of("heartbeats"), dir=memory_folder()))
        note_attempt(self.folder, replace(BEGAN, ranks=BEGAN.now))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def explain(self) -> None:
        """Raises what the ranks were ended for, if it was the watchdog that ended them."""
        if self.hang is not None:
            raise HangError(self.hang.sentence) from None

    def readings(self) -> list[Reading]:
        self._open()
        return [
            read_heartbeat(self._words[rank]) if rank in self._words else Reading(rank, state=NOT_BEGUN)
            for rank in self._ranks
        ]

    def _open(self) -> None:
        if len(self._ranks) < self._all:
            self._ranks = ranks_in(self.folder)
        for rank in self._ranks:
            if rank not in self._words and heartbeat_path(self.folder, rank).exists():
                with heartbeat_path(self.folder, rank).open("rb") as file:
                    words = memoryview(mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)).cast("q")
                if words[VERSION]:
                    self._words[rank] = words

    def _watch(self) -> None:
        spec = self._run.resilience
        silence = Silence(TICK)
        stragglers = Stragglers(self._run.layout, Path(self._run.output.folder), self.folder)
        while not self._over.wait(TICK):
            self._open()
            if self._looks is not None:
                self._looks.count(self._more())
            all_there = len(self._words) == self._all
            if all_there and stragglers.is_due(self._words[self._ranks[0]][STEP]):
                pace = stragglers.look(self.readings())
                if pace is not None and self._told is not None:
                    self._told(pace)
            noted = tuple(words[place] for words in self._words.values() for place in (CHANGES, DEVICE_PASSED))
            seconds = silence.look(time.monotonic(), noted, self._starved())
            if not spec.hang_factor:
                continue
            # A rank that has not shown itself may work.
            known = len(self._ranks) == self._all
            if known and (stuck := self._standstill.look(seconds, self.readings)) is not None:
                self._end(*stuck, seconds)
                return
            if seconds < spec.hang_floor_seconds:
                continue
            readings = self.readings()
            limit = limit_of_all(readings, spec)
            if limit.seconds and seconds >= limit.seconds and not any(_has_ended(reading) for reading in readings):
                self._end(readings, limit, seconds)
                return

    def _more(self) -> float:
        """Seconds beyond the floor for which this rank may be silent in the phase it is in; its set-up has a limit of
        its own."""
        own = next((reading for reading in self.readings() if reading.pid == os.getpid()), None)
        if own is None or own.phase == "set-up":
            return 0.0
        limit = limit_of(own, self._run.resilience)
        return max(0.0, limit.seconds - self._run.resilience.hang_floor_seconds) if limit.seconds else inf

    def _starved(self) -> float:
        """The fraction of the last tick in which some rank could have run and had no core."""
        fraction = 0.0
        for rank, words in self._words.items():
            with suppress(OSError, IndexError, ValueError):
                delay = int(Path(f"/proc/{words[PID]}/schedstat").read_text().split()[1])
                fraction = max(fraction, (delay - self._waited_for_a_core.get(rank, delay)) / 1e9 / TICK)
                self._waited_for_a_core[rank] = delay
        return fraction

    def _end(self, readings: list[Reading], limit: Limit, seconds: float) -> None:
        """Say who hangs, keep what tells why, and end all ranks: the attempt fails with what is said here."""
        if self._looks is not None:
            self._looks.count(max(ENDING, self._more()))
        moment, folder = time.time(), Path(self._run.output.folder)
        target = _next_report(folder)
        try:
            with suppress(OSError):  # a disk that is full stops nobody
                target.mkdir(parents=not self._began_with_folder)  # one that was removed since stays so
            recorders = Recorders(readings, folder, self.folder)
            found = self._judge(readings)
            end = f"silent for {seconds:.1f} s, limit {limit.seconds:.1f} s ({limit.origin}); stacks in {target}"
            self.hang = Hang(found.culprits, f"{found.sentence}; {end}")
            open_now: dict[int, Open] = {}
            with suppress(OSError):
                collect_stacks(readings, self.folder, target)
                records = {rank: oldest_open(path) for rank, path in recorders.collect(target).items()}
                open_now = {rank: each for rank, each in records.items() if each is not None}
            sentence = "; ".join(filter(None, (found.sentence, tell_open(open_now), end)))
            self.hang = Hang(found.culprits, sentence)
            report: dict[str, Any] = {
                "time": moment,
                "culprits": list(found.culprits),
                "sentence": sentence,
                "silent_seconds": seconds,
                "limit_seconds": limit.seconds,
                "limit_origin": limit.origin,
                "open_collectives": {rank: str(each) for rank, each in open_now.items()},
                "ranks": [reading.as_json() for reading in readings],
            }
            with suppress(OSError):
                (target / "report.json").write_text(json.dumps(report, indent=1))
            if self._announce is not None:
                self._announce(sentence)
        finally:
            # This process may be one of the ranks: it comes last, or the others would stay.
            for reading in sorted(readings, key=lambda reading: reading.pid == os.getpid()):
                if reading.pid:
                    with suppress(ProcessLookupError):
                        os.kill(reading.pid, signal.SIGKILL)


def _has_ended(reading: Reading) -> bool:
    """Its agent sees that by itself, and says why; those that have finished are no reason not to look at the others."""
    return reading.state in GONE and reading.phase != "finish"


def _next_report(folder: Path) -> Path:
    number = 1 + max((int(path.name.partition("-")[2]) for path in folder.glob(REPORTS)), default=0)
    return folder / f"hang-{number:05d}"


def shared_folder(attempt: str) -> Path:
    """The same for all ranks of this node that one launcher started, for one attempt of theirs. Others can guess its
    name and write beside it, so it is believed only if it is ours."""
    folder = Path(memory_folder()) / f"{prefix_of('heartbeats', _launcher())}{attempt}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise UserError(
            f"{folder}, where ranks show what they do, is not a folder of this user alone; remove it, or start the job "
            "again, which gives it another name"
        )
    return folder


def _launcher() -> int:
    """The process that started all ranks of this node. Tasks of srun may each have a shell in between."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        for parent in psutil.Process().parents():
            if parent.name() == "slurmstepd":
                return int(parent.pid)
    return os.getppid()
