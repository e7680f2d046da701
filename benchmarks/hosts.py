"""Hosts on one machine: network namespaces joined by a bridge, each with a link whose rate is limited by `tc tbf`.

    with Hosts(4, rate="200mbit") as hosts:
        hosts.run(0, ["cuboid", "train", ...])     # a subprocess.Popen in host 0
        hosts.cut(2)                               # packets from and to host 2 vanish; nobody is told
        hosts.restore(2)
        hosts.divide([2, 3])                       # these reach each other and none of the others, until restore(2, 3)

Needs root and iproute2. All hosts see the same files and processes, as if they shared a network file system; only
their networks are apart. Try it: `python benchmarks/hosts.py` joins two hosts and times bytes between them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

INTERFACE = "eth0"
"""What every host calls its link."""
_numbers = count()


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_no_hosts() -> str:
    """Why none can be made here; nothing if they can: a kernel may know no namespaces, bridges or limits of rates."""
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("ip") is None:
        return "this needs root and iproute2"
    try:
        with Hosts(2, "1gbit") as hosts:
            hosts.divide([1])
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} says: {(error.stderr or '').strip() or error}"
    return ""


class Hosts:
    """`count` hosts, numbered from 0. Leaving the context ends every process in them and removes them."""

    def __init__(self, count: int, rate: str | None = None) -> None:
        """`rate` as tc writes it, e.g. 200mbit, for each direction of each host's link; None: as fast as memory."""
        if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("ip") is None:
            raise SystemExit("hosts are network namespaces: they need root and iproute2")
        mark = f"c{os.getpid()}{chr(97 + next(_numbers))}"  # names of interfaces have at most 15 characters
        self.names = [f"{mark}{host}" for host in range(count)]
        self._bridge, self._far_bridge = mark, f"{mark}x"
        try:
            self._open()
            if rate is not None:
                self.set_rate(rate)
        except BaseException:
            for name in self.names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)  # a link goes with its host
            for bridge in (self._bridge, self._far_bridge):
                subprocess.run(["ip", "link", "del", bridge], capture_output=True)
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"10.83.0.{host + 1}"

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a host; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], **options)

    def cut(self, host: int) -> None:
        """As if a switch had died: the host's link stays up, and nothing arrives at either end any more."""
        ip("link", "set", self.names[host], "nomaster")

    def restore(self, *hosts: int) -> None:
        for host in hosts:
            ip("link", "set", self.names[host], "master", self._bridge)

    def divide(self, hosts: Sequence[int]) -> None:
        """As if the switches were two, and the line between them had died."""
        for host in hosts:
            ip("link", "set", self.names[host], "master", self._far_bridge)

    def set_rate(self, rate: str, host: int | None = None) -> None:
        """Of one host's link or all of them, in each direction."""
        for number, name in enumerate(self.names):
            if host in (None, number):
                # The bucket holds a few milliseconds of traffic: a larger one would hide the rate from small messages.
                bucket = ["burst", str(max(16_384, round(bytes_per_second(rate) * 0.004))), "latency", "200ms"]
                for tc, link in ((["tc"], name), (["tc", "-n", name], INTERFACE)):
                    limit = [*tc, "qdisc", "replace", "dev", link, "root", "tbf", "rate", rate, *bucket]
                    subprocess.run(limit, check=True, capture_output=True, text=True)

    def processes(self, host: int) -> list[int]:
        return [int(number) for number in ip("netns", "pids", self.names[host]).split()]

    def close(self) -> None:
        for host, name in enumerate(self.names):
            for process in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            while self.processes(host):
                time.sleep(0.05)
            ip("link", "del", name)  # its other end goes with it
            ip("netns", "del", name)
        for bridge in (self._bridge, self._far_bridge):
            ip("link", "del", bridge)

    def _open(self) -> None:
        for bridge in (self._bridge, self._far_bridge):
            ip("link", "add", bridge, "type", "bridge")
            ip("link", "set", bridge, "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            ip("link", "set", name, "master", self._bridge, "up")
            ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")


def bytes_per_second(rate: str) -> float:
    """What tc calls a rate: 200mbit, 1gbit, 25mbps (bytes)."""
    match = re.fullmatch(r"([0-9.]+)([kmgt]?)(bit|bps)", rate.lower())
    if match is None:
        raise SystemExit(f"rate={rate} is not a rate; write it like 200mbit or 1gbit")
    number = float(match[1]) * 1000.0 ** " kmgt".index(match[2] or " ")
    return number / 8 if match[3] == "bit" else number


_RECEIVE = "import socket; s = socket.create_server(('', 9000)); c = s.accept()[0]\nwhile c.recv(1 << 20): pass"
_SEND = """import socket, sys, time
for _ in range(100):
    try: s = socket.create_connection((sys.argv[1], 9000)); break
    except OSError: time.sleep(0.1)
start = time.time(); s.sendall(bytes(20_000_000)); s.shutdown(socket.SHUT_WR); s.recv(1)
print(f"20 MB in {time.time() - start:.2f} s")"""


def main() -> None:
    with Hosts(2) as hosts:
        for rate in ("100mbit", "400mbit"):
            hosts.set_rate(rate)
            receiver = hosts.run(0, [sys.executable, "-c", _RECEIVE])
            print(rate, end=": ", flush=True)
            hosts.run(1, [sys.executable, "-c", _SEND, hosts.address(0)]).wait()
            receiver.wait()


if __name__ == "__main__":
    main()
