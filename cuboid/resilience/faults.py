"""Faults on purpose, to rehearse what a job does when something fails: each strikes one rank, once per job.

    CUBOID_FAULT="kill rank=3 step=7; hang rank=1 step=12 at=backward" cuboid train run.toml

kill    the process ends without a word        stop    it is stopped by SIGSTOP
raise   an exception in its training loop      hang    it sleeps for ever
nan     its gradients' norm becomes NaN        spin    it computes for ever
flip    one bit of its weights flips           term    it is sent SIGTERM, as by a scheduler
oom     it asks for more memory than there is
slow    it sleeps `seconds` at each such place, from `step` on for `steps` steps (default: all)

`at` names the place: a phase (set-up, step, evaluation, save, finish), what the rank does (data, forward, backward,
gradients, update, …) or waits in (all-reduce, all-gather, message, …); default: the step itself."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from cuboid.errors import UserError, either
from cuboid.telemetry.heartbeat import ACTIVITIES, ACTIVITY, PHASE, PHASES, STEP, WAIT, WAITS, Heartbeat

VARIABLE = "CUBOID_FAULT"
STRUCK = "fault-*.json"
Kind = Literal["kill", "stop", "term", "raise", "hang", "spin", "nan", "flip", "oom", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_TENSORS = ("nan", "flip", "oom")
"""What the training itself does where it is asked to."""
LONGEST = 1e6
"""Seconds that a rank may sleep."""
PLACES = tuple(name for name in (*PHASES, *ACTIVITIES, *WAITS) if name)


@dataclass(frozen=True)
class Fault:
    kind: Kind
    rank: int
    step: int = 1
    """Counted from one, as in metrics.jsonl."""
    at: str = "step"
    seconds: float = 0.1
    steps: int = 0
    """How many steps are slow; 0: all that follow."""

    def is_due(self, heartbeat: Heartbeat) -> bool:
        words = heartbeat.words
        names = (PHASES[words[PHASE]], ACTIVITIES[words[ACTIVITY]], WAITS[words[WAIT]])
        if self.at == "set-up":  # wherever it stands then: it does little else than wait for others
            return names[0] == "set-up"
        if self.at not in names or (names[2] and self.at != names[2]):
            return False
        step = words[STEP]
        if self.kind != "slow":
            return step == self.step
        return step >= self.step and (not self.steps or step < self.step + self.steps)


def parse_faults(text: str) -> list[Fault]:
    """
    >>> parse_faults("kill rank=3 step=7; slow rank=0 step=2 seconds=0.5")[0]
    Fault(kind='kill', rank=3, step=7, at='step', seconds=0.1, steps=0)
    """
    return [_parse(part.split()) for part in text.split(";") if part.strip()]


def _parse(words: list[str]) -> Fault:
    kind, *settings = words
    if kind not in KINDS:
        raise UserError(f"fault {kind} is unknown; use {either(KINDS)}")
    values: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in ("rank", "step", "at", "seconds", "steps") or not value:
            raise UserError(f"fault {kind} has no {setting}; use rank=, step=, at=, seconds= and steps=")
        values[name] = value
    if "rank" not in values:
        raise UserError(f"fault {kind} names no rank; use {kind} rank=1 step=5")
    at = values.get("at", "step").replace("_", " ")
    if at not in PLACES:
        raise UserError(f"fault {kind} at={at} is no place; use {either(PLACES)}")
    try:
        rank, step, steps = (
            int(values.get(name, default)) for name, default in (("rank", 0), ("step", 1), ("steps", 0))
        )
        seconds = float(values.get("seconds", 0.1))
    except ValueError:
        raise UserError(f"fault {' '.join(words)} has something that is no number; use rank=1 step=5") from None
    if not 0 <= seconds <= LONGEST:
        raise UserError(f"fault {kind} seconds={seconds:g} is no time to sleep; use seconds=0.1, at most {LONGEST:g}")
    return Fault(kind, rank, step, at, seconds, steps)


class Injector:
    """The faults of one rank; called at each note of its heartbeat."""

    def __init__(self, faults: list[Fault], rank: int, heartbeat: Heartbeat, folder: Path) -> None:
        self._heartbeat = heartbeat
        self._folder = folder
        self._left = {number: fault for number, fault in enumerate(faults, 1) if fault.rank == rank}
        self._slowed = -1

    def __call__(self) -> None:
        for number, fault in list(self._left.items()):
            if fault.kind not in IN_TENSORS and fault.is_due(self._heartbeat):
                if fault.kind == "slow":
                    self._slow(fault)
                elif self._claim(number, fault):
                    _strike(fault)

    def strikes(self, kind: Kind) -> bool:
        """Whether the tensors of this rank are to be struck now."""
        return any(
            fault.kind == kind and fault.step == self._heartbeat.words[STEP] and self._claim(number, fault)
            for number, fault in list(self._left.items())
        )

    def _slow(self, fault: Fault) -> None:
        step = self._heartbeat.words[STEP]
        if fault.at != "step" or step != self._slowed:
            self._slowed = step
            time.sleep(fault.seconds)

    def _claim(self, number: int, fault: Fault) -> bool:
        """Whether it has not struck yet: ranks that are started again do not meet it a second time."""
        del self._left[number]
        path = self._folder / STRUCK.replace("*", f"{number:02d}")
        try:
            with path.open("x") as file:
                file.write(json.dumps({"fault": vars(fault), "time": time.time()}))
        except FileExistsError:
            return False
        return True


def _strike(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "raise":
        raise RuntimeError(f"injected by {VARIABLE}")
    elif fault.kind == "hang":
        _sleep_for_ever()
    else:
        _spin_for_ever()


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def _spin_for_ever() -> NoReturn:
    while True:
        pass


def arm(heartbeat: Heartbeat, rank: int, folder: str | Path) -> None:
    """Called by a rank as it begins: what the environment asks for strikes from here on."""
    faults = parse_faults(os.environ.get(VARIABLE, ""))
    if any(fault.rank == rank for fault in faults):
        heartbeat.hook = Injector(faults, rank, heartbeat, Path(folder))


def strikes(heartbeat: Heartbeat, kind: Kind) -> bool:
    """Whether this rank is to spoil its own gradient (nan) or weights (flip) in the step it has begun, or to run out of
    memory (oom)."""
    return isinstance(heartbeat.hook, Injector) and heartbeat.hook.strikes(kind)
