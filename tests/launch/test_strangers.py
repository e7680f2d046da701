"""Two supervisors train on loopback while strangers knock at every port they and their ranks listen on."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cuboid.secure_channel import MAGIC, greet
from tests.cli.command import Training, rows
from tests.launch.ports import free_port


class Strangers:
    """Who know all about the job but its secret."""

    def __init__(self, ports: list[int]) -> None:
        self._ports, self._over, self.came = ports, threading.Event(), dict.fromkeys(ports, 0)
        self.threads = [threading.Thread(target=self._knock, args=(port,), daemon=True) for port in ports]
        for thread in self.threads:
            thread.start()

    def _knock(self, port: int) -> None:
        held: list[socket.socket] = []
        while self.came[port] < 1000 and not self._over.is_set():
            with suppress(OSError):
                line = socket.create_connection(("127.0.0.1", port), timeout=5)
                held.append(line)
                self.came[port] += 1
                self._say(line, self.came[port])
            if len(held) > 50:
                held.pop(0).close()
        for line in held:
            line.close()

    def _say(self, line: socket.socket, number: int) -> None:
        line.settimeout(0.05)
        if number % 5 == 1:
            line.sendall(os.urandom(number))
        elif number % 5 == 2:
            line.sendall((MAGIC + bytes(32))[: number % 40])
        elif number % 5 == 3:  # as a client of PyTorch's store begins
            line.sendall(bytes([0]) + struct.pack("<I", 0x3C85F7CE) + bytes([1]) + struct.pack("<Q", 4) + b"init")
        elif number % 50 == 4:
            greet(line, os.urandom(32), "coordinator", seconds=0.05)

    def end(self) -> None:
        self._over.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def supervisors() -> Iterator[list[Training]]:
    started: list[Training] = []
    yield started
    for supervisor in started:
        for process in supervisor.processes():
            os.kill(process, signal.SIGKILL)
        supervisor.command.wait()
        assert supervisor.command.stderr is not None
        supervisor.command.stderr.close()


def test_strangers_at_every_port_change_nothing(tmp_path: Path, supervisors: list[Training]) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    memory = tmp_path / "memory"
    memory.mkdir()
    for number in range(2):
        variables = {"CUBOID_NODE": f"node-{number}"}
        fields = ("checkpoint.every=1000", "checkpoint.memory_every=5", f"checkpoint.memory_folder={memory}")
        options = ("--nodes", "2", "--rendezvous", rendezvous)
        supervisors.append(Training(tmp_path, "dp=2", *fields, options=options, variables=variables))
        supervisors[0].wait_until(lambda: "coordinator at" in supervisors[0].log.read_text())
    supervisors[0].wait_for_a_step(8)
    ports = sorted(set().union(*(supervisor.listening_ports() for supervisor in supervisors)))
    # Coordinator, gate, store, its end on the other node, copies in memory, and one of gloo for each rank.
    assert int(rendezvous.partition(":")[2]) in ports and len(ports) >= 6
    outside = [port for port in ports if port not in _loopback_stores(supervisors)]
    began, before = time.monotonic(), len(rows(tmp_path / "runs/default/metrics.jsonl"))
    strangers = Strangers(outside)
    while min(strangers.came.values()) < 1000:
        assert time.monotonic() - began < 300, strangers.came
        assert all(supervisor.command.poll() is None for supervisor in supervisors)
        time.sleep(0.05)
    strangers.end()
    supervisors[0].wait_for_a_step(before + 10)
    supervisors[1].command.send_signal(signal.SIGTERM)
    ended = [supervisor.end() for supervisor in supervisors]
    assert [code for code, _ in ended] == [75, 75]
    assert not (tmp_path / "runs/default/failures.jsonl").exists(), "nothing was ever started again"
    said = [line for _, text in ended for line in text.splitlines() if "warning" in line]
    # Steps are so short that a copy may take longer than the five until the next.
    assert not [line for line in said if "is still in flight" not in line]
    assert (tmp_path / "runs/default/secret").stat().st_mode & 0o777 == 0o600


def _loopback_stores(supervisors: list[Training]) -> set[int]:
    """PyTorch's store, and the end of the tunnel to it: on a real network they are on loopback alone, and closed."""
    told = supervisors[0].log.read_text()
    open_to_others = {int(part.partition(";")[0]) for part in told.split("127.0.0.1:")[1:]}
    own = set().union(*(supervisor.listening_ports(of_ranks=False) for supervisor in supervisors))
    return own - open_to_others
