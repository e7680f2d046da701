"""How long a job may stand still before it hangs: learned from the job itself, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cuboid.spec.run import ResilienceSpec
from cuboid.telemetry.heartbeat import Phase
from cuboid.telemetry.heartbeat_reader import Learned, Reading

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
        """`noted`: how many notes each rank has made. `starved`: the share of the time since the last look in which
        some rank waited for a core."""
        passed = min(moment - self._moment, 2 * self._tick)
        self._moment = moment
        if noted != self._noted:
            self._noted, self.seconds = noted, 0.0
        else:
            self.seconds += passed * max(LEAST_SPEED, 1 - starved)
        return self.seconds
