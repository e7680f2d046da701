"""Faults in a job on one machine, all its ranks under one supervisor. Used by `chaos.py`.

What happens to it leaves no trace: every byte of its last checkpoint, and every loss, is that of a run left alone."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from chaos_job import (
    PACE,
    Clock,
    Disk,
    Job,
    Told,
    alone_in,
    command,
    parent_of,
    rows,
    send,
    why_no_clocks,
    why_no_disks,
)

STEPS, EVERY = 36, 3
LAYOUTS = [
    "dp=2",
    "tp=2",
    "pp=2,schedule=zb1p",
    "dp=2,zero=3",
    "dp=2,zero=1",
    "dp=4",
    "dp=2,tp=2,zero=1",
    "pp=4,schedule=zb1p",
    "dp=2,pp=2,zero=3",
    "tp=2,pp=2,schedule=interleaved",
    "dp=2,cp=2,zero=2",
    "dp=2,tp=2,pp=2",
    "dp=4,tp=2,zero=3",
]
INSIDE = ("kill", "stop", "raise", "hang", "nan", "slow", "flip")
DISKS = ("full", "disk")
OUTSIDE = ("torn", "copy", "process", *DISKS, "clock")
PLACES = ("step", "data", "forward", "backward", "update")


def why_not(kind: str, layouts: Sequence[str]) -> str:
    """Why a kind cannot be tried here; nothing if it can."""
    if kind == "flip":
        return "" if any(map(has_copies, layouts)) else "none of the layouts keeps all state twice"
    return {"full": why_no_disks, "disk": why_no_disks, "clock": why_no_clocks}.get(kind, str)()


def has_copies(layout: str) -> bool:
    """Whether all state is kept more than once: a bit that flips there is found before it is in a checkpoint."""
    return bool(re.search(r"\bdp=([2-9]|\d\d)", layout)) and "zero" not in layout


class RanksJob:
    def __init__(
        self,
        folder: Path,
        number: int,
        layout: str,
        kinds: Sequence[str],
        fields: list[str],
        draw: random.Random,
        told: Told | None = None,
    ) -> None:
        """`told`: where to note what happens, also of a job cut off."""
        self.layout, self._draw = layout, draw
        self._above, self._number, self._fields = folder, number, fields
        steps = sorted(self._draw.sample(range(3, STEPS - 8), len(kinds)))
        self._planned = list(zip(steps, kinds, strict=True))
        self._inside = "; ".join([*map(self._describe, self._planned), PACE])
        self.told = told or Told("ranks", "")
        self.told.layout = layout

    def run(self, reference: Path) -> Told:
        name, told = f"job-{self._number}", self.told
        self._disk = Disk(self._above / f"{name}-disk") if any(kind in DISKS for _, kind in self._planned) else None
        folder = (self._disk.folder if self._disk else self._above) / name
        self._memory = self._above / f"{name}-memory"
        self._memory.mkdir()
        self._clock = (
            Clock(self._above / f"{name}.clock") if any(kind == "clock" for _, kind in self._planned) else None
        )
        self._job = Job(folder, self._above / f"{name}.log", self._start)
        self._job.start()
        try:
            for step, kind in self._planned:
                # `any process at any moment`: also while ranks start, or start again
                late = self._draw.random() * 2 if kind == "process" else 0.0
                if kind in OUTSIDE and self._job.wait_until(lambda step=step: self._job.steps_done >= step):  # type: ignore[misc]
                    time.sleep(late)
                    if not self._job.ended:
                        self._strike(kind)
            self._job.finish(told)
            self._note_struck(folder)
            self._compare(folder, reference)
            if told.problems:
                shutil.copytree(folder, self._above / f"{name}-failed", dirs_exist_ok=True)
            else:
                shutil.rmtree(folder)
        except SystemExit:
            self._note_struck(folder)
            raise
        finally:
            self._job.end()
            if self._disk:
                self._disk.close()
            shutil.rmtree(self._memory)
        return told

    def _describe(self, planned: tuple[int, str]) -> str:
        """What a rank is told to do to itself."""
        step, kind = planned
        if kind not in INSIDE:
            return ""
        world = prod(int(part) for part in re.findall(r"\b(?:dp|tp|pp|cp)=(\d+)", self.layout))
        where = f"rank={self._draw.randrange(world)} step={step} at={self._draw.choice(PLACES)}"
        return f"{kind} {where}" + (" seconds=0.3 steps=4" if kind == "slow" else "")

    def _start(self, _: int, environment: dict[str, str]) -> subprocess.Popen[Any]:
        kinds = {kind for _, kind in self._planned}
        extra = ["resilience.bad_steps=retry", f"training.steps={STEPS}", f"checkpoint.every={EVERY}"]
        extra += ["resilience.check_replicas_every=1"] if "flip" in kinds else []
        extra += ["checkpoint.memory_every=2", f"checkpoint.memory_folder={self._memory}"] if "copy" in kinds else []
        environment |= {"CUBOID_FAULT": self._inside}
        environment |= self._clock.environment if self._clock else {}
        words = command(self.layout, self._job.folder, *self._fields, *extra)
        log = self._job.log.open("a")
        return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _strike(self, kind: str) -> None:
        job, before, began = self._job, self._job.steps_done, time.monotonic()
        said = getattr(self, f"_strike_{kind}")()
        self.told.faults.append(f"{kind} {said} after step {before}")
        if job.wait_until(lambda: job.steps_done > before) and kind != "clock":
            self.told.recoveries.append((kind, time.monotonic() - began))

    def _strike_torn(self) -> str:
        """Cut or flip a file of the newest checkpoint, and kill a rank before a newer one is written."""
        return self._damage(sorted(self._job.folder.glob("checkpoints/step-*"))[-1:], "data-*.bin")

    def _strike_copy(self) -> str:
        """The same of copies in memory."""
        return self._damage([self._memory], "**/*.bin")

    def _damage(self, folders: list[Path], pattern: str) -> str:
        how = "nothing there"
        while victims := [path for folder in folders for path in sorted(folder.glob(pattern))]:
            with suppress(FileNotFoundError):  # a newer one may take its place at any moment
                how = self._damage_one(self._draw.choice(victims))
                break
        self._kill_a_rank()
        return how

    def _damage_one(self, victim: Path) -> str:
        content = bytearray(victim.read_bytes())
        how = self._draw.choice(["cut", "flipped"])
        if how == "cut":
            del content[len(content) // 2 :]
        elif content:
            content[self._draw.randrange(len(content))] ^= 1 << self._draw.randrange(8)
        with victim.open("r+b") as file:  # never makes one anew
            file.write(content)
            file.truncate()
        return how

    def _kill_a_rank(self) -> None:
        if ranks := self._job.ranks():
            send(self._draw.choice(ranks), signal.SIGKILL)

    def _strike_process(self) -> str:
        """Any of them; a supervisor is started again, as a scheduler would."""
        job = self._job
        victim, supervisor = self._draw.choice(job.processes()), job.supervisors[0].pid
        ranks = job.ranks()
        serves = any(parent_of(rank) == victim for rank in ranks)
        send(victim, signal.SIGKILL)
        if victim != supervisor:
            return "rank" if victim in ranks else "fork server" if serves else "helper"
        job.supervisors[0].wait()
        time.sleep(self._draw.random())
        job.start()
        return "supervisor"

    def _strike_full(self) -> str:
        """For a second; every second time a rank is lost meanwhile."""
        assert self._disk is not None
        self._disk.fill()
        time.sleep(0.5)
        if loses := self._draw.random() < 0.5:
            self._kill_a_rank()
        time.sleep(self._draw.random())
        self._disk.free()
        return "and a rank lost" if loses else "alone"

    def _strike_disk(self) -> str:
        """It stands still, for moments and once for longer."""
        assert self._disk is not None
        pauses = [0.2, 0.4, self._draw.choice([1.0, 3.0, 6.0])]
        for pause in pauses:
            self._disk.stand_still(pause)
            time.sleep(0.2)
        return f"still for {sum(pauses):g} s"

    def _strike_clock(self) -> str:
        assert self._clock is not None
        said = f"{self._clock.jump(self._draw):+g} s"
        if self._draw.random() < 0.5:
            time.sleep(1.2)
            self._kill_a_rank()
        return said

    def _note_struck(self, folder: Path) -> None:
        """What ranks did to themselves."""
        # A rank that is lost as it notes its fault, or finds the disk full, leaves an empty file: that is not counted.
        noted = [text for path in sorted(folder.glob("fault-*.json")) if (text := path.read_text())]
        self._struck = [json.loads(text) for text in noted]
        for found in self._struck:
            fault = found["fault"]
            self.told.faults.append(f"{fault['kind']} rank={fault['rank']} step={fault['step']} at={fault['at']}")
        # `slow` makes no file of its own; it has struck if the run got there
        done = self._job.steps_done
        self.told.faults += [f"slow from step {step}" for step, kind in self._planned if kind == "slow" and step < done]

    def _compare(self, folder: Path, reference: Path) -> None:
        told, struck = self.told, self._struck
        if told.problems:
            return
        if last_state(folder) != last_state(reference):
            told.problems.append("its last checkpoint is not that of the run nothing happened to")
        same_rows(told, rows(folder / "metrics.jsonl"), rows(reference / "metrics.jsonl"), 0.0)
        self._count_lost(folder, struck)

    def _count_lost(self, folder: Path, struck: list[dict[str, Any]]) -> None:
        times = {row["step"]: row["time"] for row in rows(folder / "metrics.jsonl")}
        if self._clock is None:
            self.told.recoveries += [
                (found["fault"]["kind"], times[found["fault"]["step"]] - found["time"]) for found in struck
            ]
        steps = sorted(found["fault"]["step"] for found in struck if found["fault"]["kind"] not in ("nan", "flip"))
        failures = rows(folder / "failures.jsonl")
        alone = all(kind in INSIDE for _, kind in self._planned)
        if alone and len(failures) == len(steps):  # each failure is that fault, no other alarm was raised
            lost = [step - 1 - row["checkpoint"] for step, row in zip(steps, failures, strict=True)]
            self.told.lost_steps = lost
            if max(lost, default=0) > 2 * EVERY:
                self.told.problems.append(f"{max(lost)} steps were lost, with a checkpoint every {EVERY}")


def same_rows(told: Told, found: list[dict[str, Any]], expected: list[dict[str, Any]], within: float) -> None:
    """Every step once, in order, with the loss it would have had."""
    if [row["step"] for row in found] != list(range(1, len(expected) + 1)):
        told.problems.append(f"steps are lost or twice: {[row['step'] for row in found]}")
        return
    far = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(found, expected, strict=True))
    if far > within:
        told.problems.append(f"a loss is {far:.1e} from that of the run nothing happened to")


def last_state(folder: Path) -> dict[str, str]:
    """File of the last checkpoint -> its checksum, of all that hold state."""
    newest = max((folder / "checkpoints").glob("step-*"))
    files: dict[str, dict[str, str]] = json.loads((newest / "manifest.json").read_text())["files"]
    return {newest.name + "/" + name: told["checksum"] for name, told in files.items() if name.endswith(".bin")}


def make_reference(folder: Path, layout: str, fields: list[str]) -> Path:
    """A run nothing happens to, made once."""
    place = folder / f"unharmed-{re.sub(r'[^a-z0-9]', '-', layout)}"
    with alone_in(place.with_suffix(".lock")):
        if not place.exists():
            extra = [f"training.steps={STEPS}", f"checkpoint.every={EVERY}"]
            words = command(layout, place, *fields, *extra)
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
    return place
