"""A campaign of random faults: every job must finish without help, as if nothing had happened to it.

    python benchmarks/chaos.py [--faults 100] [--seed 0] [--hosts] [--json]

Trainings of 4 to 8 ranks meet faults at random ranks, steps and places, several in one run:
kill      SIGKILL of a rank                        stop      SIGSTOP of a rank
raise     an exception in a rank                   hang      a rank sleeps for ever
nan       a gradient of a rank becomes NaN         torn      the newest checkpoint is cut or flipped, then a kill
agent     SIGKILL of a supervisor of two, which is started again later, as a scheduler would
leader    the same of the one that leads: the other takes its place, and it follows when it is back
link      a host's link is cut for a while (with --hosts: network namespaces, needs root and iproute2)

After faults in one place a run recovers on the same layout: every byte of its last checkpoint must equal that of a run
nothing happened to. Where nodes come and go the layout changes: float64 losses must equal to 1e-9."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, EVERY = 40, 3
LIMIT = 900.0
"""Seconds a job may take, all its recoveries included."""
LAYOUTS = [
    "dp=4",
    "dp=2,tp=2,zero=1",
    "pp=4,schedule=zb1p",
    "dp=2,pp=2,zero=3",
    "tp=2,pp=2,schedule=interleaved",
    "dp=2,cp=2,zero=2",
    "dp=2,tp=2,pp=2",
    "dp=4,tp=2,zero=3",
]
INSIDE = ("kill", "stop", "raise", "hang", "nan")
PLACES = ("step", "data", "forward", "backward", "update")
FIELDS = [
    "training.global_batch=8",
    "training.sequence=16",
    "training.device=cpu",
    "training.deterministic=true",
    f"training.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "resilience.hang_floor_seconds=4",
    "resilience.setup_seconds=120",
    "resilience.contact_seconds=10",
]


@dataclass
class Told:
    """What a job showed."""

    kind: str
    layout: str
    faults: list[str]
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    lost_steps: list[int] = field(default_factory=list)
    """Steps that were done again, of each recovery."""


def command(layout: str, folder: Path, *fields: str, more: tuple[str, ...] = ()) -> list[str]:
    settings = [word for setting in (*FIELDS, *fields, f"output.folder={folder}") for word in ("--set", setting)]
    return [sys.executable, "-m", "cuboid.cli.main", "train", "--json", "--layout", layout, *more, *settings]


def start(words: list[str], log: Path, **environment: str) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        words, env={**os.environ, **environment}, stdout=log.open("a"), stderr=subprocess.STDOUT, start_new_session=True
    )


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line for line in lines if line.endswith("\n")]
    return int(json.loads(rows[-1])["step"]) if rows else 0


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_state(folder: Path) -> dict[str, str]:
    """File of the last checkpoint -> its checksum, of all that hold state."""
    newest = max((folder / "checkpoints").glob("step-*"))
    files: dict[str, dict[str, str]] = json.loads((newest / "manifest.json").read_text())["files"]
    return {newest.name + "/" + name: told["checksum"] for name, told in files.items() if name.endswith(".bin")}


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.told: list[Told] = []

    def reference(self, layout: str, *fields: str) -> Path:
        """A run nothing happens to, made once."""
        name = re.sub(r"\W", "-", f"{layout} {' '.join(fields)}")
        folder = self.folder / f"unharmed-{name}"
        if not folder.exists():
            subprocess.run(command(layout, folder, *fields), check=True, stdout=subprocess.DEVNULL)
        return folder

    def wait(self, happened: Callable[[], bool], job: subprocess.Popen[Any], limit: float = LIMIT) -> bool:
        """False: the job ended, or the time is over."""
        until = time.monotonic() + limit
        while not happened():
            if job.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def ranks(self, count: int) -> None:
        """A job on one machine; faults from inside, and torn checkpoints from outside."""
        layout = self.random.choice(LAYOUTS)
        number = len(self.told)
        folder, log = self.folder / f"job-{number}", self.folder / f"job-{number}.log"
        world = 1
        for part in re.findall(r"\b(?:dp|tp|pp|cp)=(\d+)", layout):
            world *= int(part)
        steps = sorted(self.random.sample(range(2, STEPS), count))
        kinds = [self.random.choice((*INSIDE, "torn")) for _ in steps]
        inside = [
            f"{kind} rank={self.random.randrange(world)} step={step} at={self.random.choice(PLACES)}"
            for kind, step in zip(kinds, steps, strict=True)
            if kind != "torn"
        ]
        torn = [step for kind, step in zip(kinds, steps, strict=True) if kind == "torn"]
        told = Told("ranks", layout, [*inside, *(f"torn after step {step}" for step in torn)])
        self.told.append(told)
        reference = self.reference(layout)
        began = time.monotonic()
        job = start(command(layout, folder, "resilience.bad_steps=retry"), log, CUBOID_FAULT="; ".join(inside))
        for step in torn:
            if self.wait(lambda step=step: steps_done(folder) >= step, job):  # type: ignore[misc]
                self._tear(folder, job)
        self._finish(told, job, log, began)
        if not told.problems:
            if last_state(folder) != last_state(reference):
                told.problems.append("its last checkpoint is not that of the run nothing happened to")
            if losses(folder) != losses(reference):
                told.problems.append("its losses are not those of the run nothing happened to")
        self._count_lost(told, folder)
        if not told.problems:
            shutil.rmtree(folder)

    def _tear(self, folder: Path, job: subprocess.Popen[Any]) -> None:
        """Cut or flip a file of the newest checkpoint, and kill a rank before a newer one is written."""
        whole = sorted((folder / "checkpoints").glob("step-*"))
        ranks = children_of_children(job.pid)
        if whole:
            victim = self.random.choice(sorted(whole[-1].glob("data-*.bin")))
            content = bytearray(victim.read_bytes())
            if self.random.random() < 0.5:
                del content[len(content) // 2 :]
            else:
                content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            victim.write_bytes(content)
        if ranks:
            os.kill(self.random.choice(ranks), signal.SIGKILL)

    def agents(self, hosts: Any = None, leads: bool = False) -> None:
        """Two supervisors of two ranks: one is killed, or its link is cut; it comes back. `leads`: the one killed."""
        layout, number = "dp=4", len(self.told)
        folder, log = self.folder / f"job-{number}", self.folder / f"job-{number}.log"
        step = self.random.randrange(4, STEPS - 10)
        kind = "link" if hosts is not None else "leader" if leads else "agent"
        told = Told(kind, layout, [f"{kind} after step {step}"])
        self.told.append(told)
        precise = ("training.precision=float64", "training.steps=80", "learning_rate.schedule=constant")
        reference = self.reference("dp=1", *precise)
        place = (
            f"{hosts.address(0)}:29400" if hosts is not None else f"127.0.0.1:{20000 + os.getpid() % 10000 + number}"
        )
        many = ("--nodes", "2", "--min-nodes", "1", "--rendezvous", place)
        words = command(layout, folder, *precise, more=many)
        began = time.monotonic()
        if hosts is not None:
            jobs = [hosts.run(host, words, stdout=log.open("a"), stderr=subprocess.STDOUT) for host in (0, 1)]
        else:
            jobs = [start(words, log)]
            time.sleep(1)  # the first to come leads
            jobs.append(start(words, log))
        lost, left = (0, 1) if leads else (1, 0)
        if not self.wait(lambda: steps_done(folder) >= step, jobs[0]):
            told.problems.append("it did not get to the fault")
        elif hosts is not None:
            hosts.cut(1)
            self.wait(lambda: steps_done(folder) > step + 8 and len(failure_rows(folder)) > 0, jobs[0])
            hosts.restore(1)
        else:
            os.kill(jobs[lost].pid, signal.SIGKILL)
            jobs[lost].wait()
            self.wait(lambda: steps_done(folder) > step + 8 and len(failure_rows(folder)) > 0, jobs[left])
            jobs[lost] = start(words, log)
        for job in (jobs[left], jobs[lost]):
            self._finish(told, job, log, began)
        if not told.problems:
            pairs = list(zip(losses(folder), losses(reference), strict=True))
            if max(abs(a - b) / abs(b) for a, b in pairs) > 1e-9:
                told.problems.append("its losses are not those of one process")
        self._count_lost(told, folder)

    def _finish(self, told: Told, job: subprocess.Popen[Any], log: Path, began: float) -> None:
        try:
            code = job.wait(max(1.0, LIMIT - (time.monotonic() - began)))
            if code:
                told.problems.append(f"exit code {code}: {log.read_text().strip().splitlines()[-1][:300]}")
        except subprocess.TimeoutExpired:
            told.problems.append(f"not over after {LIMIT:g} s; it is ended, its log is {log}")
            for rank in children_of_children(job.pid):
                os.kill(rank, signal.SIGKILL)
            job.kill()
            job.wait()
        told.seconds = time.monotonic() - began

    def _count_lost(self, told: Told, folder: Path) -> None:
        faults = [json.loads(path.read_text())["fault"] for path in folder.glob("fault-*.json")]
        struck = sorted(fault["step"] for fault in faults if fault["kind"] != "nan")  # which starts nothing again
        rows = failure_rows(folder)
        torn = any(fault.startswith("torn") for fault in told.faults)
        if not torn and len(rows) == len(struck):  # each failure is that fault, no other alarm was raised
            told.lost_steps = [step - 1 - row["checkpoint"] for step, row in zip(struck, rows, strict=True)]
            if max(told.lost_steps, default=0) > 2 * EVERY:
                told.problems.append(f"{max(told.lost_steps)} steps were lost, with a checkpoint every {EVERY}")


def failure_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def children_of_children(pid: int) -> list[int]:
    """Ranks are forks of the fork server, a child of the supervisor."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return sorted(process for process, parent in parents.items() if parents.get(parent) == pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--agents", type=int, default=8, help="how many of them are killed supervisors")
    parser.add_argument("--leaders", type=int, default=8, help="how many are killed supervisors that lead")
    parser.add_argument("--links", type=int, default=8, help="how many are cut links, with --hosts")
    parser.add_argument("--hosts", action="store_true", help="cut links between network namespaces too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    links = options.links if options.hosts else 0
    with tempfile.TemporaryDirectory(prefix="cuboid-chaos-") as folder:
        campaign = Campaign(Path(folder), options.seed)
        left = options.faults - options.agents - options.leaders - links
        while left > 0:
            count = min(left, campaign.random.randint(3, 6))
            campaign.ranks(count)
            left -= count
            show(campaign.told[-1])
        for number in range(options.agents + options.leaders):
            campaign.agents(leads=number >= options.agents)
            show(campaign.told[-1])
        if links:
            from hosts import Hosts

            for _ in range(links):
                with Hosts(2, rate="200mbit") as hosts:
                    campaign.agents(hosts)
                show(campaign.told[-1])
        failed = [told for told in campaign.told if told.problems]
        kinds = Counter(fault.split()[0] for told in campaign.told for fault in told.faults)
        total = sum(kinds.values())
        print(f"{total} faults in {len(campaign.told)} jobs ({dict(kinds)}): {len(failed)} jobs failed")
        if options.json:
            print(json.dumps([vars(told) for told in campaign.told]))
        if failed:
            kept = Path(tempfile.mkdtemp(prefix="cuboid-chaos-failed-"))
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            print(f"what failed is kept in {kept}")
        raise SystemExit(1 if failed else 0)


def show(told: Told) -> None:
    verdict = "as if nothing had happened" if not told.problems else "; ".join(told.problems)
    print(f"{told.kind} {told.layout}: {', '.join(told.faults)}: {told.seconds:.0f} s, {verdict}", flush=True)


if __name__ == "__main__":
    main()
