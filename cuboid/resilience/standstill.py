"""Whether a silent job stands still: no rank of it computes, compiles or reads any more.

Where nothing is learned yet, silence alone says little: one rank may compile for minutes while all others wait for it.
So each rank is looked at. One that waits in a collective, for a message or for a communicator does nothing else. One
that notes no wait is asked for the time of a core it has taken since the job fell silent, and for how far its GPU has
come. If nobody works, nobody will end the silence: that is a deadlock or a lost rank, and it is known at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from cuboid.console import say
from cuboid.resilience.diagnosis import GONE, NOT_BEGUN, STOPPED, tell_busy
from cuboid.spec.run import ResilienceSpec
from cuboid.telemetry.heartbeat import Learned, Phase, Reading, Wait, Waiting

# How long a job may stand still before it hangs: learned from the job itself, phase by phase.


ENOUGH: dict[Phase, int] = {"step": 2, "evaluation": 1, "save": 1}
"""How often a phase must have been seen to know how long it takes; what is not here is never known beforehand."""
OVER_LONGEST = 2
LEAST_SPEED = 0.6
"""However busy the machine is, time passes at this speed at least, so that a hang is found within twice the limit: half
left nothing for the moments before and after."""


@dataclass(frozen=True)
class Limit:
    seconds: float
    """0: none."""
    origin: str
    """Where it comes from, in words."""
    learned: bool = False
    """From this job's own phases."""


def limit_of(reading: Reading, spec: ResilienceSpec) -> Limit:
    """In the phase its rank is in. A job is silent no longer than its longest phase takes: `hang_factor` times the
    median of those seen, and twice the longest, are far from both noise and drift."""
    phase: Phase = "save" if reading.phase == "finish" else reading.phase  # it ends with the last save
    learned = reading.learned.get(phase, Learned())
    if phase not in ENOUGH or learned.seen < ENOUGH[phase]:
        return Limit(spec.setup_seconds, f"resilience.setup_seconds={spec.setup_seconds:g}")
    seconds = max(spec.hang_factor * learned.typical, OVER_LONGEST * learned.longest)
    if seconds < spec.hang_floor_seconds:
        return Limit(spec.hang_floor_seconds, f"resilience.hang_floor_seconds={spec.hang_floor_seconds:g}", True)
    plural = "" if learned.seen == 1 else "s"
    return Limit(seconds, f"learned from {learned.seen} {phase}{plural}", True)


def limit_of_all(readings: Sequence[Reading], spec: ResilienceSpec) -> Limit:
    """Ranks may be in different phases: the one that may take longest counts."""
    limits = [limit_of(reading, spec) for reading in readings]
    endless = [limit for limit in limits if not limit.seconds]
    return endless[0] if endless else max(limits, key=lambda limit: limit.seconds)


class Silence:
    """Seconds without progress of any rank, less those in which the watchdog itself did not run, and less CPU
    starvation of ranks up to 40 % of them."""

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._noted: tuple[int, ...] | None = None
        self._moment = 0.0
        self.seconds = 0.0

    def look(self, moment: float, noted: tuple[int, ...], starved: float = 0.0) -> float:
        """`noted`: how many notes each rank has made. `starved`: the fraction of the time since the last look in which
        some rank waited for a core."""
        passed = min(moment - self._moment, 2 * self._tick)
        self._moment = moment
        if noted != self._noted:
            self._noted, self.seconds = noted, 0.0
        else:
            self.seconds += passed * max(LEAST_SPEED, 1 - starved)
        return self.seconds


QUIET = 1.0
"""Seconds of silence after which it is noted how much ranks have worked so far."""
EVERY = 3.0
"""Seconds between two close looks; half of `stuck_seconds` after one that saw a rank work, if that is longer."""
BUSY = 0.005
"""Part of a core from which a rank works: threads that only wake up now and then take a tenth of this."""
MAY_WORK: tuple[Wait, ...] = ("load", "agreement")
"""Waits in which a rank may do something itself: read, plan."""


class Standstill:
    def __init__(
        self,
        spec: ResilienceSpec,
        everywhere: Callable[[bool], bool] = bool,
        compiles: Callable[[Reading], bool] = lambda reading: False,
    ) -> None:
        """`everywhere`: tells the other nodes whether the ranks of this one stand still, and returns whether all do.
        `compiles`: looks into the stacks of a rank."""
        self._spec, self._everywhere, self._compiles = spec, everywhere, compiles
        self._efforts: Efforts | None = None
        self._next = 0.0
        self._told = self._said = False

    def look(self, seconds: float, read: Callable[[], list[Reading]]) -> tuple[list[Reading], Limit] | None:
        """`seconds`: of silence. What all ranks do, and the limit they have passed, if nobody works any more."""
        if seconds < QUIET:
            self._efforts, self._told = None, False
            self._say_everywhere(False)
            return None
        if self._efforts is None:
            self._efforts, self._next = Efforts(read()), 0.0
        stuck = self._spec.stuck_seconds
        if not stuck or seconds < stuck or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + EVERY
        readings = read()
        if limit_of_all(readings, self._spec).learned:
            return None  # which knows better how long this phase may take
        waiting = [self._waits(reading) for reading in readings]
        busy = [reading.rank for reading, waits in zip(readings, waiting, strict=True) if waits is None]
        if busy:
            # From here on anew: over the whole silence, what a rank did before it hung would count for minutes.
            self._efforts, self._next = Efforts(readings), time.monotonic() + max(EVERY, stuck / 2)
            if not self._told and len(busy) < len(readings):
                self._told = True
                bound = f"resilience.setup_seconds={self._spec.setup_seconds:g}"
                say(f"{tell_busy(readings, busy)}; so far for {seconds:.0f} s, limit {bound}", as_warning=True)
            self._say_everywhere(False)
            return None
        if not self._say_everywhere(True):
            return None
        limit = Limit(stuck, f"resilience.stuck_seconds={stuck:g}: no rank computes, compiles or reads")
        return [reading for reading in waiting if reading is not None], limit

    def _say_everywhere(self, stands: bool) -> bool:
        """Only what has changed is told."""
        if stands or self._said:
            self._said = stands
            return self._everywhere(stands)
        return False

    def _waits(self, reading: Reading) -> Reading | None:
        """The reading of a rank that waits, as its diagnosis needs it; None: it works."""
        kind = reading.waiting.kind if reading.waiting is not None else ""
        if reading.state in (*STOPPED, *GONE):
            return reading
        if reading.state == NOT_BEGUN or (not kind and reading.activity in ("reading", "writing", "data")):
            return None
        if kind == "save":
            return None  # its own thread writes, and has a limit of its own: checkpoint.timeout_seconds
        if kind == "device":
            return reading if reading.device_left else None
        if kind and kind not in MAY_WORK:
            return reading
        assert self._efforts is not None
        if self._efforts.is_idle(reading):
            return reading
        # Its GPU has not come on while its host runs: a host waits for the device in many calls, and most of them spin,
        # as do threads of NCCL.
        if not kind and reading.device_left and not self._compiles(reading):
            return replace(reading, waiting=Waiting("device", None))
        return None


class Efforts:
    """The time of a core that each rank has taken since the job fell silent, or since a rank was last seen to work."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._begin = time.monotonic()
        self._before = {reading.rank: core_seconds(reading.pid) for reading in readings}

    def is_idle(self, reading: Reading) -> bool:
        before, now = self._before.get(reading.rank), core_seconds(reading.pid)
        if before is None or now is None or reading.state == "D":  # which waits for a disk
            return False
        return 0 <= now - before < BUSY * (time.monotonic() - self._begin)


def core_seconds(pid: int) -> float | None:
    """Of all threads of a rank, and of the processes it has started: PyTorch compiles in those. A rank that watches its
    node is looked at by a thread of its own, which does not count."""
    try:
        rank = psutil.Process(pid)
        times = [rank.cpu_times()] if pid != os.getpid() else []
        for child in rank.children(recursive=True):
            with suppress(psutil.Error):
                times.append(child.cpu_times())
    except psutil.Error:
        return None
    own = time.process_time() - time.thread_time() if pid == os.getpid() else 0.0
    return own + float(sum(each.user + each.system for each in times))
