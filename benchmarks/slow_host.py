"""Two hosts, a rank each, one at half the speed of the other: how much unequal parts of a batch win, against what was
predicted; and a host that becomes slow during a run, with the supervisor's new parts and without.

    python benchmarks/slow_host.py [--cores 0.4 | --sleep 0.25] [--steps 60] [--during 220] [--layout dp=2] [--json]

Hosts are network namespaces. Their CPU is a quota of cgroups, which holds once training has begun. A quota is the most
that a host may have; so that it is also what it gets, however many others use the cores, hosts have large shares, and
quotas of all of them together must stay below the cores there are. A rank has one thread: more would use up a quota in
the first part of each period, and stand still in the rest. --sleep does without quotas: each forward pass of a
micro-batch sleeps so long on the fast host, twice as long on the slow one.

What is predicted follows from the equal run's own measurements, as in `cuboid.resilience.rebalance`; which layout that
would choose is printed where it is another one. Runs that are compared go side by side, so that whatever else a machine
does slows both. Needs root, iproute2 and cgroups of version 1."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hosts import Hosts

from cuboid.resilience.rebalance import Pace, balance
from cuboid.spec.layout import Layout
from cuboid.spec.partition import partition
from cuboid.spec.run import Run, build_run

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 10_000
"""Microseconds: short beside a micro-batch, so that a host that stands still for the rest of one holds nobody up."""
SHARES = 200_000
"""Beside 1,024 of any other process."""
WARM = 3
"""Steps before quotas hold."""
FIELDS = {
    "training.global_batch": 12,
    "training.sequence": 64,
    "training.device": "cpu",
    "learning_rate.schedule": "constant",
    "checkpoint.every": 10,
}


class Quota:
    """The CPU that all processes started in it have together."""

    def __init__(self, name: str) -> None:
        self.folder = GROUPS / f"cuboid-{os.getpid()}-{name}"
        self.folder.mkdir()
        (self.folder / "cpu.shares").write_text(str(SHARES))
        (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD))

    def limit(self, cores: float) -> None:
        (self.folder / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD)))

    def inside(self) -> None:
        (self.folder / "cgroup.procs").write_text("0")  # whoever writes

    def close(self) -> None:
        for _ in range(100):
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


def fields_of(options: argparse.Namespace) -> list[str]:
    return [*(f"{name}={value}" for name, value in FIELDS.items()), *options.set]


class Job:
    def __init__(self, options: argparse.Namespace, folder: Path, layout: str, steps: int, *more: str) -> None:
        self.folder, self._options = folder, options
        folder.mkdir()
        fields = [*fields_of(options)]
        settings = [word for field in (*fields, f"training.steps={steps}", *more) for word in ("--set", field)]
        self._command = [sys.executable, "-m", "cuboid.cli.main", "train", "--model", options.model, "--layout", layout]
        self._command += settings

    def run(self, slow_at: int, late: bool) -> list[dict[str, Any]]:
        """The rows of all steps. The second host is at half speed from the first steps on, or (`late`) from `slow_at`
        on."""
        with Hosts(2) as hosts:
            quotas = [Quota(f"{self.folder.name}-{host}") for host in range(2)]
            try:
                sleeps = [f"slow rank={rank} at=forward seconds={self._options.sleep}" for rank in range(2)]
                sleeps.append(f"slow rank=1 step={slow_at + 1} at=forward seconds={self._options.sleep}")
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "CUBOID_FAULT": "; ".join(sleeps) if self._options.sleep else "",
                }
                started = [self._start(hosts, host, quotas[host], environment) for host in range(2)]
                cores = self._options.cores
                self._wait(lambda: len(self.rows()) >= WARM, started)
                for host, quota in enumerate(quotas):
                    if not self._options.sleep:
                        quota.limit(cores if late or host == 0 else cores / 2)
                if late:
                    self._wait(lambda: len(self.rows()) >= slow_at, started)
                    self.slow_since = time.time()
                    if not self._options.sleep:
                        quotas[1].limit(cores / 2)
                for each in started:
                    if each.wait(900):
                        raise SystemExit(f"a host ended with {each.returncode}: {self.log()[-2000:]}")
            finally:
                for host in range(2):
                    for process in hosts.processes(host):
                        with suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
                for quota in quotas:
                    quota.close()
        return self.rows()

    def _start(self, hosts: Hosts, host: int, quota: Quota, environment: dict[str, str]) -> subprocess.Popen[Any]:
        many = ["--nodes", "2", "--rendezvous", f"{hosts.address(0)}:29400"]
        log = (self.folder / f"host-{host}.log").open("w")

        def enter() -> None:
            os.setpriority(os.PRIO_PROCESS, 0, self._options.nice)
            quota.inside()

        return hosts.run(
            host,
            [*self._command, *many],
            cwd=self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=enter,
            env=environment,
        )

    def _wait(self, happened: Callable[[], bool], started: list[subprocess.Popen[Any]]) -> None:
        limit = time.monotonic() + 600
        while not happened():
            if time.monotonic() > limit or any(each.poll() for each in started):
                raise SystemExit(f"the job does not get on: {self.log()[-2000:]}")
            time.sleep(0.05)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("host-*.log")))

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "runs/default/metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def paces(self) -> dict[str, Pace]:
        """Of each host the median of its windows, but the first."""
        found = {}
        for host in range(2):
            lines = (self.folder / f"runs/default/ranks-{host:05d}.jsonl").read_text().splitlines()[1:]
            times = [json.loads(line)["ranks"][0] for line in lines]
            own = median(each["compute"] + each["data"] for each in times)
            whole = median(each["compute"] + each["data"] + each["wait"] for each in times)
            found[f"host {host}"] = Pace(0, own, whole, 0.0)
        return found


def side_by_side(jobs: Sequence[Job], slow_at: int = 0, late: bool = False) -> list[list[dict[str, Any]]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda job: job.run(slow_at, late), jobs))


def always(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    off = "resilience.rebalance=false"
    table = {"model": options.model, "layout": options.layout}
    run = build_run(table, fields_of(options))
    run = replace(run, training=replace(run.training, steps=100_000))
    layouts = {"equal": options.layout, "unequal": options.unequal}
    jobs = [Job(options, folder / name, layout, options.steps, off) for name, layout in layouts.items()]
    equal, unequal = (median(row["seconds"] for row in rows[2 * WARM :]) for rows in side_by_side(jobs))
    paces = jobs[0].paces()
    chosen = balance(run, run.layout, 1, paces)
    predicted = seconds_of(run, Layout.parse(options.unequal), list(paces.values()))
    return {
        "layout": layouts["unequal"],
        "equal_seconds": equal,
        "unequal_seconds": unequal,
        "times": equal / unequal,
        "predicted_seconds": predicted,
        "error": predicted / unequal - 1,
        "chosen": str(chosen.layout) if chosen else None,
        "chosen_seconds": chosen.after if chosen else None,
        "own_seconds": [pace.own for pace in paces.values()],
        "own_seconds_unequal": [pace.own for pace in jobs[1].paces().values()],
    }


def seconds_of(run: Run, other: Layout, paces: Sequence[Pace]) -> float:
    """Of a step of another layout, from what ranks need for themselves now: as `balance` says of the one it chooses."""
    layout, own = run.layout, [pace.own for pace in paces]
    waits = max(pace.whole for pace in paces) - max(own)
    if layout.pp == 1:
        parts = [other.weight_of(replica) * layout.dp / other.batch_parts for replica in range(layout.dp)]
        return max(each * part for each, part in zip(own, parts, strict=True)) + waits
    now, then = (
        [len(part) for part in partition(run.model, layout.pp, run.training.sequence, each.layers)]
        for each in (layout, other)
    )
    after = max(each * new / old for each, new, old in zip(own, then, now, strict=True))
    return (max(own) + waits) * after / max(own)


def during(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    jobs = {
        name: Job(options, folder / name, options.layout, options.during, f"resilience.rebalance={rebalance}")
        for name, rebalance in (("without", "false"), ("with", "true"))
    }
    side_by_side(list(jobs.values()), 10, late=True)
    for name, job in jobs.items():
        told[name] = (folder / name / "runs/default/metrics.jsonl").stat().st_mtime - job.slow_since
        told[f"lines_{name}"] = re.findall(r"^.*(?:batch_weights|layers)=.*makes.*$", job.log(), re.MULTILINE)
    told["sooner"] = 1 - told["with"] / told["without"]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=float, default=0.3, help="of the fast host; the slow one has half")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds in each forward pass, in place of quotas")
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--layout", default="dp=2")
    parser.add_argument("--unequal", default="dp=2,batch_weights=2:1", help="what is compared with --layout")
    parser.add_argument("--set", action="append", default=[], help="one more field of every run: model.layers=12")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--during", type=int, default=220, help="steps of the runs with a host that becomes slow; 0: none"
    )
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and quotas are removed
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cuboid-slow-") as folder:
        if options.steps:
            told["always"] = always(options, Path(folder))
            if not options.json:
                one = told["always"]
                print(f"one host at half speed: {one['equal_seconds']:.3f} s a step with equal parts", end=", ")
                print(
                    f"{one['unequal_seconds']:.3f} s with {one['layout']} ({one['times']:.2f} times as fast)", end="; "
                )
                print(f"predicted {one['predicted_seconds']:.3f} s ({one['error']:+.1%})", flush=True)
                print(f"the supervisor would take {one['chosen']}: {one['chosen_seconds']} s", flush=True)
        if options.during:
            told["during"] = during(options, Path(folder))
    if options.json:
        print(json.dumps(told))
    elif options.during:
        one = told["during"]
        print(
            f"a host becomes slow in step 10 of {options.during}: {one['without']:.1f} s from then to the end", end=", "
        )
        print(f"{one['with']:.1f} s with new parts ({one['sooner']:.0%} sooner)")
        print(*told["during"]["lines_with"], sep="\n")


if __name__ == "__main__":
    main()
