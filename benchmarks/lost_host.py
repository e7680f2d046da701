"""Four hosts, two ranks each, joined by links of a given rate: one is cut off in the middle of a run, and returns.

    python benchmarks/lost_host.py [--cut 3 | --kill 0] [--rate 200mbit] [--layout dp=2,tp=2,pp=2] [--json]

With --kill all processes of the host are killed, and started again later; host 0 leads first. Tells what happened when:
from the loss to training again on the hosts that are left, from its return to training again on all of them; and how
far the float64 losses are from those of a run of one process that nothing happened to.
Needs root and iproute2. Everything runs by itself; at the end the job is stopped, once it has shown enough."""

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hosts import Hosts

PORT = 29400
LIMIT = 600.0
"""Seconds in which each thing must have happened."""


def wait(happened: Callable[[], Any], what: str) -> Any:
    limit = time.monotonic() + LIMIT
    while not (answer := happened()):
        if time.monotonic() > limit:
            raise SystemExit(f"waited {LIMIT:g} s in vain for {what}")
        time.sleep(0.05)
    return answer


class Logs:
    """What all hosts said, in the order in which it was seen: whichever of them leads."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._text = folder, dict[Path, int](), ""

    def read_text(self) -> str:
        for path in sorted(self._folder.glob("host-*.log")):
            text = path.read_text()
            self._text += text[self._seen.get(path, 0) :]
            self._seen[path] = len(text)
        return self._text


class Show:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder, self.options = folder, options
        self.fields = [
            "training.steps=100000",
            "training.global_batch=16",
            "training.sequence=64",
            "training.device=cpu",
            "training.precision=float64",
            "learning_rate.schedule=constant",  # so that the losses do not depend on where the run would end
        ]
        self.log = Logs(folder)

    def command(self, *more: str, fields: list[str]) -> list[str]:
        settings = [word for field in [*self.fields, *fields] for word in ("--set", field)]
        return [sys.executable, "-m", "cuboid.cli.main", "train", *more, *settings]

    def start(self, hosts: Hosts, host: int) -> subprocess.Popen[Any]:
        many = ["--nodes", str(len(hosts.names)), "--min-nodes", "1", "--rendezvous", f"{hosts.address(0)}:{PORT}"]
        every = [f"checkpoint.every={self.options.every}", f"resilience.contact_seconds={self.options.contact}"]
        log = (self.folder / f"host-{host}.log").open("a")
        command = self.command("--layout", self.options.layout, *many, fields=every)
        return hosts.run(host, command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)

    def training_since(self, seen: int) -> tuple[str, int, int] | None:
        """The first step after this length of the leading host's log in which ranks were started again: the line that
        says with what, the step the checkpoint had, the length of the log."""
        text = self.log.read_text()[seen:]
        called = re.search(r"^\d nodes?: .*$", text, re.MULTILINE)
        if called is None:
            return None
        resumed = re.search(
            r"^resuming after step (\d+),.*?^step +(\d+)/", text[called.end() :], re.MULTILINE | re.DOTALL
        )
        return (called[0], int(resumed[1]), seen + len(text)) if resumed else None

    def losses(self, folder: Path) -> list[float]:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def show(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    play, told = Show(options, folder), dict[str, Any]()
    with Hosts(options.hosts, options.rate) as hosts:
        supervisors = [play.start(hosts, host) for host in range(options.hosts)]
        wait(lambda: re.search(r"^step +6/", play.log.read_text(), re.MULTILINE), "the first steps")
        before = len(play.log.read_text())
        lost = options.cut if options.kill is None else options.kill
        whole = len(hosts.processes(lost))
        cut = time.monotonic()
        if options.kill is None:
            hosts.cut(lost)
        else:
            for process in hosts.processes(lost):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            supervisors[lost].wait()
        ended: list[float] = []

        def again() -> Any:
            if not ended and len(hosts.processes(lost)) <= whole - 2:
                ended.append(time.monotonic() - cut)
            return play.training_since(before)

        told["fewer"], told["from_step"], seen = wait(again, "training without the host")
        told["seconds_to_training_again"] = time.monotonic() - cut
        told["seconds_to_ranks_of_the_cut_host_ended"] = ended[0] if ended else None
        wait(lambda: play.log.read_text()[seen:].count("\nstep") > 5, "a few steps")
        seen = len(play.log.read_text())
        back = time.monotonic()
        if options.kill is None:
            hosts.restore(lost)
        else:
            supervisors[lost] = play.start(hosts, lost)
        told["more"], _, seen = wait(lambda: play.training_since(seen), "the host taken back")
        told["seconds_to_all_hosts_again"] = time.monotonic() - back
        wait(lambda: play.log.read_text()[seen:].count("\nstep") > 5, "a few steps")
        os.kill(supervisors[1].pid, signal.SIGTERM)  # all save and leave
        told["exit_codes"] = [supervisor.wait(LIMIT) for supervisor in supervisors]
        told["failures"] = [json.loads(line) for line in (folder / "runs/default/failures.jsonl").open()]
    survived = play.losses(folder / "runs/default")
    fields = [f"training.steps={len(survived)}", f"output.folder={folder / 'alone'}"]
    subprocess.run(play.command("--json", fields=fields), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    alone = play.losses(folder / "alone")
    told["steps"] = len(survived)
    told["largest_difference"] = max(abs(a - b) / abs(b) for a, b in zip(survived, alone, strict=True))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--cut", type=int, default=3, help="which host; 0 leads, and trains alone without the others")
    parser.add_argument("--kill", type=int, help="which host is killed, in place of a cut; 0 leads")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--layout", default="dp=2,tp=2,pp=2")
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--contact", type=float, default=10.0, help="seconds of silence after which a host is lost")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    with tempfile.TemporaryDirectory(prefix="cuboid-hosts-") as folder:
        told = show(options, Path(folder))
    if options.json:
        print(json.dumps(told))
        return
    what = f"{options.cut} of {options.hosts} cut off" if options.kill is None else f"{options.kill} killed"
    print(f"host {what}, {options.layout}, links of {options.rate}")
    for failure in told["failures"]:
        print(f"  noted: {failure['reason']}")
    print(f"  {told['fewer']}")
    print(f"  ranks of the lost host ended after {told['seconds_to_ranks_of_the_cut_host_ended'] or 0:.1f} s")
    print(f"  training again after {told['seconds_to_training_again']:.1f} s, from step {told['from_step']}")
    print(f"  {told['more']}")
    print(f"  on all hosts again {told['seconds_to_all_hosts_again']:.1f} s after it came back")
    print(f"  {told['steps']} steps; largest relative difference of a loss {told['largest_difference']:.1e}")
    print(f"  exit codes {told['exit_codes']}")


if __name__ == "__main__":
    main()
