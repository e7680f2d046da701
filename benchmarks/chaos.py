"""A campaign of random faults: every job must end right without help, as if nothing had happened to it.

    python benchmarks/chaos.py [--faults 100] [--leaders 10] [--hosts] [--kinds full,disk] [--seed 0] [--json]
        [--jobs 12 --minutes 8]            # so many jobs at once; after so long nothing more is begun
        [--out FOLDER]                     # a row a job as it ends, and the logs of those that failed
    python benchmarks/chaos.py --device cuda --backend nccl       # on a GPU, which ranks may share
        [--faults 8 --kinds kill,stop,raise,hang,nan,torn,copy,process --layouts dp=2]      # in two minutes

Many faults strike one job, at random ranks, steps and places. In jobs on one machine, of 2 to 8 ranks:
kill      SIGKILL of a rank                        stop      SIGSTOP of a rank
raise     an exception in a rank                   hang      a rank sleeps for ever
nan       a gradient of a rank becomes NaN         slow      a rank is slow for some steps
flip      a bit of a weight of a rank flips, on layouts that keep all state twice
torn      the newest checkpoint is cut or a bit of it flips, then a kill
copy      the same of the copies in memory
process   SIGKILL of any process at any moment: rank, fork server, supervisor (which is started again)
full      the disk is full for a while             disk      the disk stands still, again and again
clock     the wall clock jumps by up to a month, forward or back
In jobs on four nodes of one rank:
agent     SIGKILL of a supervisor, which is started again later, as a scheduler would
leader    the same of the one that leads: another takes its place
frozen    a node stands still for longer than others wait, and wakes up
pulse     a node has two fifths of its time        skew      the clock of one node jumps, then it loses a process
filled    the run's folder is full for a while     halted    the run's folder answers nobody for a while
link      a node is cut off, and back              partition nodes are divided 2|2 or 1|3, and joined again
junk      every port is attacked from another host: junk, halves, replays, forged nodes, 1,000 connections

A disk is a loop device with a file system of its own, which fills up or is frozen (root). A clock is what the processes
of a job are told the time of day is, by a library put before the system's (a C compiler); counted seconds stay right.
Nodes are on loopback, or with --hosts in network namespaces (root, iproute2). What cannot be tried is named, with the
reason. What happens in a job depends on the seed and its number alone, not on what runs beside it.

On one machine a run recovers on the same layout: every byte of its last checkpoint and every loss must equal that of
a run nothing happened to. Where nodes come and go the layout changes: float64 losses must equal to 1e-9. Every step
stands once, and never do two processes write the rows of a run."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import chaos_nodes
import chaos_ranks
from chaos_job import Told
from hosts import Hosts, why_no_hosts

RANKS_KINDS = (*chaos_ranks.INSIDE, *chaos_ranks.OUTSIDE)
NODES_KINDS = (*chaos_nodes.ANYWHERE, *chaos_nodes.ON_HOSTS)


@dataclass
class Planned:
    number: int
    where: str
    kinds: list[str]


class Campaign:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._alone = chaos_nodes.Alone(folder)
        self._fields = [f"training.device={options.device}", f"training.backend={options.backend}"]
        self._began = time.monotonic()
        self._until = self._began + 60 * options.minutes
        self._left = self.plan()
        self._running: dict[Connection, tuple[BaseProcess, Planned]] = {}
        self.told: list[Told] = []

    def plan(self) -> list[Planned]:
        """The jobs. Those on nodes, which take longest, come first, so that all are over at about the same time."""
        options, draw = self._options, random.Random(self._options.seed)
        leaders = min(options.leaders, options.faults) if "leader" in options.kinds else 0
        on_ranks = [kind for kind in RANKS_KINDS if kind in options.kinds]
        on_nodes = [kind for kind in NODES_KINDS if kind in options.kinds and kind != "leader"]
        left = options.faults - leaders
        # A fault of a node takes three times as long as one of a rank.
        nodes = (left // 4 if on_ranks else left) if on_nodes else 0
        drawn = _draw_evenly(on_nodes, nodes, draw) + ["leader"] * leaders
        draw.shuffle(drawn)
        jobs = [("nodes", part) for part in _dealt(drawn, options.each)]
        drawn = _draw_evenly(on_ranks, left - nodes, draw)
        jobs += [("ranks", part) for part in _dealt(drawn, options.each)]
        return [Planned(number, where, kinds) for number, (where, kinds) in enumerate(jobs)]

    def run(self) -> None:
        """As many jobs at once as were asked for, each in a process of its own; each is told as it ends."""
        while self._left or self._running:
            while self._left and len(self._running) < self._options.jobs and time.monotonic() < self._until:
                self._start(self._left.pop(0))
            if not self._running:
                return
            for ended in wait(list(self._running)):
                assert isinstance(ended, Connection)
                self._hear(ended)

    def end(self) -> None:
        """Of what runs; each removes its hosts and disks, and what was told so far stands in the summary."""
        for process, _ in self._running.values():
            process.terminate()
        for connection in list(self._running):
            self._hear(connection)

    def _start(self, planned: Planned) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._become, args=(planned, theirs))
        process.start()
        theirs.close()
        self._running[ours] = process, planned

    def _hear(self, connection: Connection) -> None:
        process, planned = self._running[connection]
        try:
            told: Told = connection.recv()
        except EOFError:
            told = Told(planned.where, "", problems=["it could not be tried: its process ended"])
        process.join()
        connection.close()
        del self._running[connection]
        self.told.append(told)
        show(told, planned.number, self._options.json)
        if self._options.out:
            self._keep(told, planned.number)

    def _keep(self, told: Told, number: int) -> None:
        """What a time limit does not take away."""
        with (self._options.out / "chaos.jsonl").open("a") as file:
            file.write(json.dumps({"job": number, **vars(told)}) + "\n")
        for log in self._folder.glob(f"job-{number}.log") if told.problems else ():
            shutil.copy(log, self._options.out)

    def _become(self, planned: Planned, to: Connection) -> None:
        """The process of one job."""
        told = Told(planned.where, "")
        try:
            told = self._job(planned, told)
        except SystemExit:
            told.problems.append("the campaign was ended before the job was over")
        except (OSError, subprocess.SubprocessError) as error:  # of this program, say a disk that cannot be made
            told.problems.append(f"it could not be tried: {error}")
        to.send(told)

    def _job(self, planned: Planned, told: Told) -> Told:
        draw = random.Random(f"{self._options.seed}:{planned.number}")
        number, kinds = planned.number, planned.kinds
        if planned.where == "nodes":
            with Hosts(chaos_nodes.NODES + 1, "1gbit") if self._options.hosts else nullcontext() as hosts:
                job = chaos_nodes.NodesJob(self._folder, number, kinds, hosts, draw, told)
                return job.run(self._alone, self._until)
        layouts = [layout for layout in self._options.layouts if "flip" not in kinds or chaos_ranks.has_copies(layout)]
        layout = draw.choice(layouts)
        reference = chaos_ranks.make_reference(self._folder, layout, self._fields)
        return chaos_ranks.RanksJob(self._folder, number, layout, kinds, self._fields, draw, told).run(reference)

    def summary(self) -> dict[str, object]:
        kinds = Counter(fault.split()[0] for told in self.told for fault in told.faults)
        seconds: dict[str, list[float]] = {}
        for kind, took in [found for told in self.told for found in told.recoveries]:
            seconds.setdefault(kind, []).append(took)
        return {
            "faults": sum(kinds.values()),
            "jobs": len(self.told),
            "failed": sum(bool(told.problems) for told in self.told),
            "not_started": len(self._left),
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "kinds": {
                kind: {
                    "count": number,
                    "in_failed_jobs": sum(
                        fault.split()[0] == kind for told in self.told if told.problems for fault in told.faults
                    ),
                    "seconds": [round(median(seconds[kind]), 1), round(max(seconds[kind]), 1)]
                    if kind in seconds
                    else [],
                }
                for kind, number in sorted(kinds.items())
            },
        }


def _draw_evenly(kinds: list[str], number: int, draw: random.Random) -> list[str]:
    """Each kind as often as any other, in any order."""
    drawn = (kinds * (number // max(1, len(kinds)) + 1))[:number] if kinds else []
    draw.shuffle(drawn)
    return drawn


def _dealt(kinds: list[str], size: int) -> list[list[str]]:
    return [kinds[start : start + size] for start in range(0, len(kinds), size)]


def why_not(kind: str, options: argparse.Namespace) -> str:
    """Why a kind cannot be tried here; nothing if it can."""
    if kind in RANKS_KINDS:
        return chaos_ranks.why_not(kind, options.layouts)
    return chaos_nodes.why_not(kind, options.hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--leaders", type=int, help="how many are losses of the leading node; default: a tenth")
    parser.add_argument("--kinds", help="only these, as a,b; default: all that can be tried here")
    parser.add_argument("--hosts", action="store_true", help="nodes are network namespaces (root and iproute2)")
    parser.add_argument("--layouts", nargs="+", default=chaos_ranks.LAYOUTS, help="of jobs on one machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="nccl or gloo; with a GPU faults of ranks alone are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=10, help="faults in one job; to start it takes as long as one")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no job and no fault of a node begins")
    parser.add_argument("--out", type=Path, help="a folder for chaos.jsonl and logs of failed jobs")
    parser.add_argument("--json", action="store_true", help="a line for each job, and the summary last")
    options = parser.parse_args()
    asked = (
        options.kinds.split(",") if options.kinds else [*RANKS_KINDS, *(NODES_KINDS if options.device == "cpu" else ())]
    )
    if unknown := set(asked) - {*RANKS_KINDS, *NODES_KINDS}:
        parser.error(f"kinds={','.join(sorted(unknown))} are unknown; use {','.join((*RANKS_KINDS, *NODES_KINDS))}")
    if options.hosts and (reason := why_no_hosts()):
        print(f"nodes are on loopback, because network namespaces cannot be made: {reason}", file=sys.stderr)
        options.hosts = False
    reasons = {kind: why_not(kind, options) for kind in asked}
    options.kinds = [kind for kind in asked if not reasons[kind]]
    for reason in sorted({*reasons.values()} - {""}):
        kinds = ", ".join(kind for kind in asked if reasons[kind] == reason)
        print(f"not tried: {kinds}, because {reason}", file=sys.stderr, flush=True)
    options.leaders = max(1, options.faults // 10) if options.leaders is None else options.leaders
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and disks are removed
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cuboid-chaos-"))
    campaign = Campaign(options, folder)
    try:
        campaign.run()
    finally:
        campaign.end()
        summary = campaign.summary()
        print(json.dumps(summary) if options.json else f"{summary}", flush=True)
        if options.out:
            (options.out / "chaos.json").write_text(json.dumps(summary))
        if summary["failed"]:
            print(f"what failed is kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    raise SystemExit(1 if summary["failed"] or not campaign.told else 0)


def show(told: Told, number: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"job": number, **vars(told)}), flush=True)
        return
    verdict = "as if nothing had happened" if not told.problems else "; ".join(told.problems)
    faults = ", ".join(told.faults)
    print(f"job {number}, {told.kind} {told.layout}: {faults}: {told.seconds:.0f} s, {verdict}", flush=True)


if __name__ == "__main__":
    main()
