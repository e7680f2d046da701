"""Faults in a job of four nodes with a rank each, of which one is enough to continue. Used by `chaos.py`.

Nodes leave and come back, and the layout changes with them: every step is done once, its float64 loss is that of one
process to 1e-9, and no two processes ever write the run's rows. Nodes are supervisors on loopback, or `Hosts`."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos_job import (
    PACE,
    Clock,
    Disk,
    Job,
    Told,
    WriterWatch,
    alone_in,
    command,
    rows,
    send,
    why_no_clocks,
    why_no_disks,
)
from chaos_ranks import same_rows
from hosts import Hosts
from strangers import HEARD, listening

from cuboid.checkpoint.terms import Terms

NODES = 4
CONTACT = 6.0
PRECISE = [
    "training.precision=float64",
    "learning_rate.schedule=constant",  # so that losses do not depend on where the run would end
    "training.device=cpu",
]
FIELDS = [*PRECISE, "training.steps=100000", "checkpoint.every=5", f"resilience.contact_seconds={CONTACT:g}"]
DISKS = ("filled", "halted")
ANYWHERE = ("agent", "leader", "frozen", "pulse", "skew", *DISKS)
ON_HOSTS = ("link", "partition", "junk")


def why_not(kind: str, on_hosts: bool) -> str:
    """Why a kind cannot be tried here; nothing if it can."""
    needs = {"skew": why_no_clocks, "filled": why_no_disks, "halted": why_no_disks}
    return needs.get(kind, lambda: "" if on_hosts or kind in ANYWHERE else "this needs --hosts")()


class Fell(Exception):
    """The job is not where it should be; says why."""


class NodesJob:
    def __init__(
        self,
        folder: Path,
        number: int,
        kinds: Sequence[str],
        hosts: Hosts | None,
        draw: random.Random,
        told: Told | None = None,
    ) -> None:
        """`hosts`: four, and one more for a stranger. `told`: where to note what happens, also of a job cut off."""
        self._above, self._kinds, self._hosts = folder, kinds, hosts
        self._draw = draw
        name = f"job-{number}"
        self._scratch = folder / f"{name}-scratch"
        self._scratch.mkdir()
        clocks = [Clock(self._scratch / f"clock-{node}") for node in range(NODES)] if "skew" in kinds else []
        self._clocks = clocks
        self._disk = Disk(self._scratch / "disk") if set(DISKS) & set(kinds) else None
        self._job = Job((self._disk.folder if self._disk else folder) / name, folder / f"{name}.log", self._start)
        self.told = told or Told("nodes", "")
        self.told.layout = "dp=4"
        self._place = f"{hosts.address(0)}:29400" if hosts else f"127.0.0.1:{_free_port(number)}"

    def _start(self, node: int, environment: dict[str, str]) -> subprocess.Popen[Any]:
        more = ("--nodes", str(NODES), "--min-nodes", "1", "--rendezvous", self._place)
        words = command("dp=4", self._job.folder, *FIELDS, more=more)
        environment |= {"CUBOID_FAULT": PACE, **(self._clocks[node].environment if self._clocks else {})}
        options: dict[str, Any] = {"stdout": self._job.log.open("a"), "stderr": subprocess.STDOUT, "env": environment}
        if self._hosts is not None:
            return self._hosts.run(node, words, start_new_session=True, **options)
        return subprocess.Popen(words, start_new_session=True, **options)

    def run(self, reference: Callable[[int], list[dict[str, Any]]], until: float = math.inf) -> Told:
        """`until`: on the clock of `time.monotonic`; no fault begins later."""
        job, told = self._job, self.told
        try:
            self._do_all(until)
            found = rows(job.folder / "metrics.jsonl")
            if found:
                same_rows(told, found, reference(len(found)), 1e-9)
            if told.problems and self._disk:
                shutil.copytree(job.folder, self._above / f"{job.folder.name}-failed")
        finally:
            if self._disk:
                self._disk.close()
            shutil.rmtree(self._scratch)
        return told

    def _do_all(self, until: float) -> None:
        job, told = self._job, self.told
        watch = WriterWatch(job)
        try:
            job.start(0)
            job.wait_until(lambda: "coordinator at" in self._log(), 120)
            for node in range(1, NODES):
                job.start(node)
            self._settle()
            for kind in self._kinds:
                if time.monotonic() < until:
                    self._strike(kind)
            job.supervisors[self._draw.randrange(NODES)].send_signal(signal.SIGTERM)  # all save and leave
            job.finish(told, code=75)
        except Fell as error:
            told.problems.append(str(error))
            told.seconds = time.monotonic() - job.began
        finally:
            job.end()
            told.problems += watch.end()

    def _log(self) -> str:
        return self._job.log.read_text() if self._job.log.exists() else ""

    def _training(self) -> int:
        """Nodes that train by the last order."""
        called = re.findall(r"^(\d) nodes?: ", self._log(), re.MULTILINE)
        return int(called[-1]) if called else 0

    def _wait(self, happened: Callable[[], object], what: str, limit: float = 180.0) -> None:
        if not self._job.wait_until(happened, limit):
            codes = {node: each.poll() for node, each in self._job.supervisors.items() if each.poll() is not None}
            why = f"supervisors ended (node: exit code) {codes}" if codes else f"not within {limit:g} s"
            said = [line for line in self._log().splitlines() if "error" in line or "warning" in line]
            raise Fell(f"{what}: {why}; load {os.getloadavg()[0]:.0f}; {' | '.join(said[-3:])[:900]}")

    def _wait_for_steps(self, what: str, steps: int = 3) -> None:
        """Until so many steps more than now are done."""
        before = self._job.steps_done
        self._wait(lambda: self._job.steps_done >= before + steps, what)

    def _settle(self) -> None:
        """All nodes train."""
        self._wait(lambda: self._training() == NODES, "all nodes train")
        self._wait_for_steps("a few steps with all nodes")

    def _strike(self, kind: str) -> None:
        before, began = self._job.steps_done, time.monotonic()
        said = getattr(self, f"_strike_{kind}")
        heal, what = said()
        self.told.faults.append(f"{kind} {what} after step {before}")
        self._wait_for_steps(f"training after {kind} {what}")
        self.told.recoveries.append((kind, time.monotonic() - began))
        heal()
        self._settle()

    def _leader(self) -> int:
        term = Terms(self._job.folder).newest()
        pid = term.leader.rpartition("/")[2] if term else ""
        for node, supervisor in self._job.supervisors.items():
            if str(supervisor.pid) == pid:
                return node
        raise Fell(f"nobody of the nodes leads: {term}")

    def _follower(self) -> int:
        leader = self._leader()
        return self._draw.choice([node for node in range(NODES) if node != leader])

    # Each does what it is called, and returns how it is mended and what it was.

    def _strike_agent(self, node: int | None = None) -> tuple[Callable[[], None], str]:
        node = self._follower() if node is None else node
        self._job.kill(node)
        del self._job.supervisors[node]
        return lambda: self._job.start(node), f"of node {node}"

    def _strike_leader(self) -> tuple[Callable[[], None], str]:
        return self._strike_agent(self._leader())

    def _strike_frozen(self) -> tuple[Callable[[], None], str]:
        """A machine that stands still for longer than others wait, and wakes up."""
        leader = self._leader()
        node = self._draw.choice([leader, self._follower()])
        for process in self._job.processes(node):
            send(process, signal.SIGSTOP)

        def wake() -> None:
            for process in self._job.processes(node):
                send(process, signal.SIGCONT)

        time.sleep(CONTACT + 1)
        return wake, f"of node {node}" + (", which leads" if node == leader else "")

    def _strike_pulse(self) -> tuple[Callable[[], None], str]:
        """A node so slow that it has two fifths of its time."""
        node = self._draw.randrange(NODES)
        for _ in range(8):
            for what in (signal.SIGSTOP, signal.SIGCONT):
                for process in self._job.processes(node):
                    send(process, what)
                time.sleep(0.3 if what == signal.SIGSTOP else 0.2)
        return lambda: None, f"of node {node}"

    def _strike_skew(self) -> tuple[Callable[[], None], str]:
        """The wall clock of one node jumps; then the node loses a rank, or its supervisor."""
        node = self._draw.randrange(NODES)
        seconds = self._clocks[node].jump(self._draw)
        time.sleep(1.2)
        if self._draw.random() < 0.5:
            for rank in self._job.ranks(node):
                send(rank, signal.SIGKILL)
            return lambda: None, f"{seconds:+g} s on node {node}, a rank lost"
        return self._strike_agent(node)[0], f"{seconds:+g} s on node {node}, its supervisor lost"

    def _strike_filled(self) -> tuple[Callable[[], None], str]:
        """The run's folder takes nothing more: who leads cannot say so there, nor can anybody else."""
        assert self._disk is not None
        seconds = self._draw.choice([1.0, CONTACT])
        self._disk.fill()
        time.sleep(seconds)
        self._disk.free()
        return lambda: None, f"for {seconds:g} s"

    def _strike_halted(self) -> tuple[Callable[[], None], str]:
        """The run's folder answers nobody."""
        assert self._disk is not None
        seconds = self._draw.choice([1.0, CONTACT, 2 * CONTACT])
        self._disk.stand_still(seconds)
        return lambda: None, f"for {seconds:g} s"

    def _strike_link(self) -> tuple[Callable[[], None], str]:
        assert self._hosts is not None
        node = self._follower()
        self._hosts.cut(node)
        return self._mended(node), f"of node {node}"

    def _strike_partition(self) -> tuple[Callable[[], None], str]:
        """Two and two, one and three; healed before anybody is missed, or long after."""
        assert self._hosts is not None
        nodes = self._draw.sample(range(NODES), self._draw.choice([1, 2, 3]))
        said = f"{sorted(nodes)} from the others, node {self._leader()} leads"
        self._hosts.divide(nodes)
        if self._draw.random() < 0.3:
            time.sleep(2)
            self._hosts.restore(*nodes)
            return lambda: None, f"{said}, for 2 s"
        return self._mended(*nodes), said

    def _mended(self, *nodes: int) -> Callable[[], None]:
        assert self._hosts is not None
        hosts = self._hosts
        time.sleep(CONTACT + 1)
        return lambda: hosts.restore(*nodes)

    def _strike_junk(self) -> tuple[Callable[[], None], str]:
        """At every port that is reached from outside: junk, halves, replays, forged nodes, a thousand connections."""
        assert self._hosts is not None
        script = str(Path(__file__).with_name("strangers.py"))
        words = [sys.executable, script, "--record", str(self._scratch / "recorded"), "--seconds", "2"]
        self._hosts.run(0, words).wait()
        ports = sorted({port for name in self._hosts.names[:NODES] for port in listening(name)})
        (self._scratch / "ports").write_text(json.dumps(ports))
        words = [sys.executable, script, "--attack", str(self._scratch), "--seconds", "4", "--connections", "1000"]
        sent = self._hosts.run(NODES, words, stdout=subprocess.PIPE, text=True).communicate()[0]
        count = json.loads(sent)
        heard = count.pop(HEARD)
        if heard > 200:
            self.told.problems.append(f"a stranger was sent {heard} bytes")
        return lambda: None, f"{sum(count.values())} times at {len(ports)} ports"


class Alone:
    """The losses of one process, made anew where more of them are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "alone"

    def __call__(self, steps: int) -> list[dict[str, Any]]:
        with alone_in(self._folder.with_suffix(".lock")):
            found = rows(self._folder / "metrics.jsonl")
            if len(found) < steps:
                with suppress(FileNotFoundError):
                    shutil.rmtree(self._folder)
                words = command("dp=1", self._folder, *PRECISE, f"training.steps={steps + steps // 2}")
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
                found = rows(self._folder / "metrics.jsonl")
        return found[:steps]


def _free_port(number: int) -> int:
    """Another for each job, and none that the system gives to a connection before the job listens there."""
    for port in range(12_000 + 40 * number, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")
