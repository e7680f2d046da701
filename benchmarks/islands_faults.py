"""Islands that are killed while others train: what it costs these, and whether those are back.

    python benchmarks/islands.py faults --faults 30 --json faults.jsonl         # needs root: hosts are namespaces
    python benchmarks/islands.py faults --faults 4 --steps 600 --kinds decider
    python benchmarks/islands.py faults --table faults.jsonl

Three islands, each on a host of its own, train one small model; two of the hosts are places where islands meet, so that
either decides for all. A fault kills every process of one island at once, and starts it again two seconds later: any
one (`island`), the one that decides (`decider`), one in the middle of a round (`round`), one that is saving (`save`).
A step takes `--step` seconds, padded by sleeping. A job has `--per-job` faults; before them two jobs without any, of
other seeds, say how far seeds are apart.

A line of JSON for each fault: steps that survivors lost (that others had taken before them, or that they took twice)
and their longest time between two steps; the step at which the island was back. One for each job: how it ended, and
the loss of the last tenth of its steps, of all islands."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import Hosts
from islands_jobs import command, environment, options_of, rows, rows_of, tell

ISLANDS, PORT = 3, 29500
KINDS = ("island", "decider", "round", "save")
PATIENCE = 240.0
"""Seconds after which an island that is not back is lost."""


class Job:
    """A set of islands, from start to end."""

    def __init__(self, hosts: Hosts, folder: Path, seed: int, options: argparse.Namespace) -> None:
        self.hosts, self.folder, self.options = hosts, folder, options
        self.settings: dict[str, object] = {
            "model.layers": 2,
            "training.steps": options.steps,
            "training.global_batch": 4,
            "training.sequence": 64,
            "training.seed": seed,
            "training.device": "cpu",
            "learning_rate.peak": 0.002,
            "checkpoint.every": 25,
            "islands.count": ISLANDS,
            "islands.every": 8,
            "islands.fragments": 2,
            "islands.delay": 2,
            "islands.bits": 8,
            "islands.rate": 1.0,
            "islands.momentum": 0.5,
            "islands.quorum": 2,
            "islands.grace_seconds": 10.0,
        }
        self.decides = 0
        """The island whose host decides for all."""
        self._environment = environment(options.step)
        self._places = ",".join(f"{hosts.address(each)}:{PORT}" for each in (0, 1))
        self.running = [self._start(each) for each in range(ISLANDS)]

    def _start(self, number: int) -> subprocess.Popen[Any]:
        words = command(self.folder, number, self._places, self.settings)
        with (self.folder / f"log-{number}").open("a") as log:
            return self.hosts.run(number, words, env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    def rows(self, number: int) -> list[dict[str, Any]]:
        return rows(self.folder, number)

    def step(self, number: int) -> int:
        return max((row["step"] for row in self.rows(number)[-1:]), default=0)

    def kill(self, number: int) -> None:
        """All its processes at once."""
        for process in self.hosts.processes(number):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.running[number].wait()

    def restart(self, number: int) -> None:
        self.running[number] = self._start(number)

    def wait_for_step(self, number: int, step: int) -> bool:
        until = time.monotonic() + PATIENCE
        while self.step(number) < min(step, self.options.steps):
            if time.monotonic() > until or self.running[number].poll() not in (None, 0):
                return False
            time.sleep(0.05)
        return True

    def end(self) -> list[int | None]:
        """Their exit codes; None: it takes no more steps, and does not end."""
        steps, until = 0, time.monotonic() + PATIENCE
        while any(each.poll() is None for each in self.running) and time.monotonic() < until:
            time.sleep(0.5)
            if (now := sum(self.step(each) for each in range(ISLANDS))) > steps:
                steps, until = now, time.monotonic() + PATIENCE
        return [each.poll() for each in self.running]


def strike(job: Job, kind: str, source: random.Random) -> tuple[int, float, int]:
    """Which island is killed, when, and after which of its steps."""
    number = job.decides if kind == "decider" else source.choice([each for each in range(3) if each != job.decides])
    if kind == "decider":  # the other place takes over, and keeps that part
        job.decides = 1 - job.decides
    done = job.step(number)
    if kind == "round":  # the transfer of a round that begins every fourth step takes two
        job.wait_for_step(number, done + 4 - done % 4 + 4)
    elif kind == "save":
        place = job.folder / f"island-{number}" / "checkpoints"
        known = set(os.listdir(place)) if place.exists() else set()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not (place.exists() and set(os.listdir(place)) - known):
            time.sleep(0.002)
    else:
        job.wait_for_step(number, done + source.randrange(2, 12))
    job.kill(number)
    return number, time.time(), job.step(number)


def faults(hosts: Hosts, seed: int, kinds: list[str], options: argparse.Namespace, source: random.Random) -> bool:
    with tempfile.TemporaryDirectory(prefix="cuboid-faults-") as name:
        job = Job(hosts, Path(name), seed, options)
        well = all(job.wait_for_step(each, 20) for each in range(ISLANDS))
        struck = 0
        for kind in kinds:
            if not well:
                break
            number, when, step = strike(job, kind, source)
            time.sleep(2)
            before = len(job.rows(number))
            job.restart(number)
            until = time.monotonic() + PATIENCE
            while len(job.rows(number)) <= before + 8 and job.running[number].poll() is None:
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
            after = job.rows(number)[before:]
            well = len(after) > 8 or job.running[number].poll() == 0
            survivors = [job.rows(each) for each in range(ISLANDS) if each != number]
            costs = [_cost([row for row in found if row["time"] > when - 2]) for found in survivors]
            row = {"fault": kind, "seed": seed, "island": number, "after": step, "back": well}
            row |= {"back_at": after[0]["step"] if after else None, "seconds": round(time.time() - when, 1)}
            row |= {"lost_steps": [cost[0] for cost in costs], "longest_gap": round(max(cost[1] for cost in costs), 2)}
            tell({**row, "steps": options.steps}, options.json)
            struck += 1
        codes = job.end()
        told = [job.rows(each) for each in range(ISLANDS)]
        ended = all(code == 0 for code in codes)
        losses = [_last_loss(found) for found in told if found]
        gone = [max(0, options.steps - found[-1]["step"]) for found in told if found]
        row = {"job": seed, "faults": struck, "asked": len(kinds), "ended": ended, "codes": codes, "gone": gone}
        tell({**row, "loss": statistics.fmean(losses) if losses else None, "steps": options.steps}, options.json)
        if not ended or not well:
            for number in range(ISLANDS):
                print(f"island {number}:\n" + (Path(name) / f"log-{number}").read_text()[-3000:], flush=True)
        return ended and well


def _cost(found: list[dict[str, Any]]) -> tuple[int, float]:
    """Steps that an island did not take or took again, and the longest time between two."""
    lost, gap = 0, 0.0
    for before, row in pairwise(found):
        lost += abs(row["step"] - before["step"] - 1)
        gap = max(gap, row["time"] - before["time"])
    return lost, gap


def _last_loss(found: list[dict[str, Any]]) -> float:
    return statistics.fmean(row["loss"] for row in found[-max(1, len(found) // 10) :])


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| fault | how many | back | steps that a survivor lost, of its job's | longest time between steps |",
        "|---|---|---|---|---|",
    ]
    struck = [row for row in found if "fault" in row]
    for kind in dict.fromkeys(row["fault"] for row in struck):
        own = [row for row in struck if row["fault"] == kind]
        share = max(100 * max(row["lost_steps"]) / row["steps"] for row in own)
        gap = f"{statistics.median(row['longest_gap'] for row in own):.1f} s, at most "
        gap += f"{max(row['longest_gap'] for row in own):.1f} s"
        lines.append(f"| {kind} | {len(own)} | {sum(row['back'] for row in own)} | {share:.2f} % | {gap} |")
    for name, some in (("with", True), ("without", False)):
        losses = [row["loss"] for row in found if "job" in row and bool(row["asked"]) == some and row["loss"]]
        if losses:
            mean, spread = statistics.fmean(losses), max(losses) - min(losses)
            lines.append(
                f"\nLoss of {len(losses)} jobs {name} faults: {mean:.4f}, from lowest to highest {spread:.4f}."
            )
    return "\n".join(lines)


def main(words: list[str]) -> None:
    numbers = {"faults": 30, "per-job": 5, "steps": 1500, "plain": 2, "seed": 0, "step": 0.08}
    parser = options_of(__doc__, numbers)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args(words)
    if options.table:
        print(table(rows_of(options.table)))
        return
    source = random.Random(options.seed)
    kinds = options.kinds.split(",")
    order = [kinds[each % len(kinds)] for each in range(options.faults)]
    jobs: list[list[str]] = [[] for _ in range(options.plain)]
    jobs += [order[first : first + options.per_job] for first in range(0, len(order), options.per_job)]
    well = True
    for number, own in enumerate(jobs):
        with Hosts(ISLANDS) as hosts:
            well = faults(hosts, options.seed + number, own, options, source) and well
    raise SystemExit(not well)
