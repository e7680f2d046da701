"""Every port of a job on several hosts attacked from another host.

    python benchmarks/strangers.py [--hosts 3] [--phases 4] [--seconds 8] [--connections 1000] [--here] [--json]

Hosts are network namespaces (root and iproute2); one more of them holds the attacker, which knows all about the job but
its secret. Where none can be made, or with --here, all of it is on this machine's own address, which is not loopback.
The attacker looks up every port on which a process of the job listens, and sends to each, over and over: junk, half
messages, what was recorded of real traffic (taken with a raw socket on the first host), greetings of a forged node with
a wrong secret, requests of PyTorch's own store; and holds as many connections open as it is told. Phases of one job
alternate: the job is attacked, or the same attacker attacks somebody else, a port in its own host. Told are the step
times of both, and the processor's (which other work on the machine changes less), exit codes, the most bytes that a
stranger heard on a connection, and the largest difference of a loss to a run left alone on one machine: what is read,
and what is injected."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from hosts import Hosts, why_no_hosts

PORT = 29400
SET_ADDRESS = 0x8916
"""SIOCSIFADDR of Linux."""
FIELDS = [
    "training.global_batch=12",
    "training.sequence=64",
    "training.device=cpu",
    "training.precision=float64",
    "training.steps=100000",
    "checkpoint.every=20",
    "checkpoint.memory_every=10",
    "learning_rate.schedule=constant",
]


def listening(namespace: str) -> list[tuple[str, int]]:
    """Addresses and ports that are reached from outside of a host."""
    shown = subprocess.run(["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp"], capture_output=True, text=True)
    return [where for where, _ in _listening(shown.stdout)]


def _listening(table: str) -> list[tuple[tuple[str, int], str]]:
    """Address and port, and the number of the socket, of what listens elsewhere than on loopback."""
    found = []
    for line in table.splitlines()[1:]:
        local, state, inode = line.split()[1], line.split()[3], line.split()[9]
        address, port = local.split(":")
        if state == "0A":
            text = socket.inet_ntoa(struct.pack("<I", int(address, 16)))
            if not text.startswith("127."):
                found.append(((text, int(port, 16)), inode))
    return found


class Here:
    """In place of `Hosts`: all of them are this machine, at the address by which others would reach it. Its ports that
    are open to others are the job's and are attacked; what listens on loopback alone is not, as between hosts."""

    interface = "lo"
    """On which packets from a machine to itself travel."""

    def __init__(self, count: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # nothing is sent
                self._address: str = probe.getsockname()[0]
            except OSError:  # no network at all: loopback gets one more address, which counts as another's
                self._address = "10.83.0.1"
                asked = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(self._address))
                fcntl.ioctl(probe, SET_ADDRESS, asked)
        self._started: list[list[subprocess.Popen[Any]]] = [[] for _ in range(count)]

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [each for host in range(len(self._started)) for each in self.processes(host)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def address(self, host: int) -> str:
        return self._address

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, env={**os.environ, "CUBOID_NODE": f"host-{host}"}, **options)
        self._started[host].append(process)
        return process

    def processes(self, host: int) -> list[int]:
        found = [process.pid for process in self._started[host] if process.poll() is None]
        for process in found:  # which grows
            for thread in Path(f"/proc/{process}/task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, thread.read_text().split())
        return found

    def listening(self, host: int) -> list[tuple[str, int]]:
        own = set()
        for process in self.processes(host):
            with suppress(OSError):
                for handle in os.scandir(f"/proc/{process}/fd"):
                    with suppress(OSError):
                        own.add(os.readlink(handle.path))
        table = Path("/proc/net/tcp").read_text()
        return [where for where, inode in _listening(table) if f"socket:[{inode}]" in own]


class Apart(Hosts):
    interface = "eth0"

    def listening(self, host: int) -> list[tuple[str, int]]:
        return listening(self.names[host])


# In the attacker's host.


HEARD = "most bytes heard"
"""On one connection, of all that were made."""


def attack(
    ports: list[tuple[str, int]], recorded: list[bytes], seconds: float, connections: int, pause: float
) -> dict[str, int]:
    from cuboid.secure_channel import MAGIC, greet

    draw, until, count = random.Random(0), time.monotonic() + seconds, dict[str, int]()
    held: list[socket.socket] = []

    def one(kind: str, where: tuple[str, int]) -> None:
        line = socket.create_connection(where, timeout=1)
        line.settimeout(0.2)
        count[kind] = count.get(kind, 0) + 1
        held.append(line)
        if kind == "junk":
            line.sendall(draw.randbytes(draw.randrange(1, 5000)))
        elif kind == "half":
            line.sendall((MAGIC + bytes(32))[: draw.randrange(1, 39)])
        elif kind == "replay":
            for part in draw.sample(recorded, min(len(recorded), 3)):
                line.sendall(part)
        elif kind == "forged node":
            greet(line, draw.randbytes(32), draw.choice(["coordinator", "store", "copies"]), seconds=0.2)
        elif kind == "store":  # the first words of a client of PyTorch's store, and a key of the job
            line.sendall(bytes([0]) + struct.pack("<I", 0x3C85F7CE) + bytes([1]) + struct.pack("<Q", 4) + b"init")

    kinds = ["junk", "half", "replay", "forged node", "store", "idle"]
    while time.monotonic() < until:
        for where in ports:
            with suppress(OSError):
                one(draw.choice(kinds), where)
        while len(held) > connections:
            count[HEARD] = max(count.get(HEARD, 0), heard_on(held.pop(0)))
        time.sleep(pause)  # the attacker has the same two cores as the job; it is not the processor that is attacked
    count[HEARD] = max([count.get(HEARD, 0), *map(heard_on, held)])
    return count


def heard_on(line: socket.socket) -> int:
    """Bytes that were sent to a stranger, who then hangs up: a greeting has less than a hundred, weights have more."""
    heard = 0
    line.setblocking(False)
    with line, suppress(OSError):
        while part := line.recv(1 << 16):
            heard += len(part)
    return heard


def record(interface: str, seconds: float) -> list[bytes]:
    """What is said over TCP on this host's link."""
    found: list[bytes] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0800)) as tap:
        tap.bind((interface, 0))
        tap.settimeout(0.2)
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(found) < 5000:
            with suppress(TimeoutError):
                packet = tap.recv(1 << 16)
                if packet[23] == 6:
                    start = 14 + (packet[14] & 15) * 4
                    content = packet[start + (packet[start + 12] >> 4) * 4 :]
                    if content:
                        found.append(content)
    return found


class Job:
    def __init__(self, hosts: Apart | Here, count: int, folder: Path) -> None:
        self.folder, self.count = folder, count
        folder.mkdir()
        settings = [word for field in FIELDS for word in ("--set", field)]
        many = ["--nodes", str(count), "--rendezvous", f"{hosts.address(0)}:{PORT}"]
        words = [sys.executable, "-m", "cuboid.cli.main", "train", "--layout", f"dp={2 * count}", *many, *settings]
        self.supervisors = [
            hosts.run(host, words, cwd=folder, stdout=(folder / f"{host}.log").open("w"), stderr=subprocess.STDOUT)
            for host in range(count)
        ]

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "runs/default/metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, steps: int) -> None:
        until = time.monotonic() + 300
        while len(self.rows()) < steps:
            if time.monotonic() > until:
                raise SystemExit("".join(path.read_text() for path in sorted(self.folder.glob("*.log"))))
            time.sleep(0.1)

    def end(self) -> list[int]:
        self.supervisors[0].send_signal(signal.SIGTERM)
        return [supervisor.wait(120) for supervisor in self.supervisors]


SINK = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 9000), backlog=1024)\nwhile True: s.accept()[0].close()"
)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"sent": {}, True: [], False: [], "processor": {True: [], False: []}}
    here = options.here or bool(why_no_hosts())
    with Here(options.hosts + 1) if here else Apart(options.hosts + 1, options.rate) as hosts:
        words = ["--record", str(folder / "recorded"), "--seconds", "25", "--on", hosts.interface]
        recorder = subprocess_of(hosts, 0, words)
        sink = (hosts.address(options.hosts), 9000)
        hosts.run(options.hosts, [sys.executable, "-c", SINK, sink[0]])
        job = Job(hosts, options.hosts, folder / "job")
        job.wait_for(10)
        recorder.wait()
        for phase in range(2 * options.phases):
            attacked = phase % 2 == 1
            ports = sorted({port for host in range(options.hosts) for port in hosts.listening(host)} - {sink})
            told["ports"] = len(ports)
            (folder / "ports").write_text(json.dumps(ports if attacked else [sink] * len(ports)))
            before, spent = len(job.rows()), processor(hosts, options.hosts)
            words = ["--attack", str(folder), "--seconds", str(options.seconds)]
            words += ["--connections", str(options.connections), "--pause", str(options.pause)]
            sent = json.loads(subprocess_of(hosts, options.hosts, words, stdout=subprocess.PIPE).communicate()[0])
            heard = sent.pop(HEARD)
            if attacked:
                told["heard"] = max(told.get("heard", 0), heard)
                told["sent"] = {kind: told["sent"].get(kind, 0) + number for kind, number in sent.items()}
            told[attacked] += [row["seconds"] for row in job.rows()[before + 1 :]]
            spent, steps = processor(hosts, options.hosts) - spent, len(job.rows()) - before
            told["processor"][attacked].append(spent / max(1, steps))
        told["exit_codes"] = job.end()
        told["losses"], told["apart"] = [row["loss"] for row in job.rows()], not here
        failures = job.folder / "runs/default/failures.jsonl"
        told["failures"] = failures.read_text().splitlines() if failures.exists() else []
    return told


def subprocess_of(hosts: Apart | Here, host: int, words: list[str], **options: Any) -> subprocess.Popen[str]:
    """This program, in a host."""
    return hosts.run(host, [sys.executable, __file__, *words], text=True, **options)


def processor(hosts: Apart | Here, count: int) -> float:
    """Seconds of the processor that the job's processes have had: what other work beside it does not change."""
    spent = 0
    for process in [each for host in range(count) for each in hosts.processes(host)]:
        with suppress(OSError):
            spent += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return spent / os.sysconf("SC_CLK_TCK")


def alone(folder: Path, steps: int, layout: str) -> list[float]:
    """The losses of a run on one machine, where nobody is."""
    fields = [*FIELDS, f"training.steps={steps}", "checkpoint.memory_every=0", f"output.folder={folder / 'alone'}"]
    settings = [word for field in fields for word in ("--set", field)]
    command = [sys.executable, "-m", "cuboid.cli.main", "train", "--json", "--layout", layout, *settings]
    command += ["--oversubscribe"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (folder / "alone/metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--phases", type=int, default=4, help="of each kind")
    parser.add_argument("--here", action="store_true", help="no hosts: all on this machine's own address")
    parser.add_argument("--pause", type=float, default=0.002, help="of the attacker after each round of ports, s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--on", default="eth0", help=argparse.SUPPRESS)
    parser.add_argument("--attack", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record is not None:
        parts = record(options.on, options.seconds)
        options.record.write_text(json.dumps([part.hex() for part in parts]))
        return
    if options.attack is not None:
        ports = [tuple(port) for port in json.loads((options.attack / "ports").read_text())]
        recorded = [bytes.fromhex(part) for part in json.loads((options.attack / "recorded").read_text())]
        print(json.dumps(attack(ports, recorded, options.seconds, options.connections, options.pause)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    with tempfile.TemporaryDirectory(prefix="cuboid-strangers-") as folder:
        told = run(options, Path(folder))
        losses = told.pop("losses")
        pairs = list(zip(losses, alone(Path(folder), len(losses), f"dp={2 * options.hosts}"), strict=True))
    attacked, spared = told.pop(True), told.pop(False)
    cpu = {kind: median(told["processor"][kind == "attacked"]) for kind in ("spared", "attacked")}
    told |= {
        "processor": cpu,
        "steps": [len(spared), len(attacked)],
        "step_seconds": [median(spared), median(attacked)],
        "slower": median(attacked) / median(spared) - 1,
        "largest_difference": max(abs(a - b) / abs(b) for a, b in pairs),
    }
    if options.json:
        print(json.dumps(told))
        return
    print(f"{told['ports']} ports of {options.hosts} hosts, connections: {told['sent']}")
    print(f"most bytes that a stranger heard on one of them: {told['heard']}")
    print(f"a step takes {median(spared):.4f} s ({len(spared)} steps) while another is attacked,")
    print(f"             {median(attacked):.4f} s ({len(attacked)} steps) attacked: {100 * told['slower']:+.1f} %")
    print(f"and {cpu['spared']:.4f} and {cpu['attacked']:.4f} s of the processor: ", end="")
    print(f"{100 * (cpu['attacked'] / cpu['spared'] - 1):+.1f} % (medians of {options.phases} phases)")
    print(f"largest relative difference of a loss {told['largest_difference']:.1e}; exit codes {told['exit_codes']}")
    print(f"failures noted: {told['failures']}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))
    main()
