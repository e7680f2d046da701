"""Connections between two ranks that copy parts of the state to each other, as many as needed and no more. Both ends
prove that they are of this job. What is copied is compared afterwards by its checksum, which travels over the store."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import psutil
from torch import Tensor

from cuboid.checkpoint.storage import as_bytes
from cuboid.parallel.coordination import Coordination
from cuboid.secure_channel import Channel, Door, Stranger, greet

PURPOSE = "copies"
LONGEST = 1 << 30


def own_address() -> str:
    """Where other nodes reach this rank: on the interface that gloo was given, else under the machine's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    families = (socket.AF_INET, socket.AF_INET6)
    for entry in psutil.net_if_addrs().get(name, ()):
        if entry.family in families:
            return str(entry.address).partition("%")[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class Work:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _Link:
    """To one other rank: what is sent and what is received, each in its order and in a thread of its own."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        channel.wait_no_longer_than(seconds)
        channel.covers_content = False
        self.channel, self.ended = channel, threading.Event()
        self.sender, self.receiver = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def close(self) -> None:
        self.channel.hang_up()
        self.ended.set()
        for thread in (self.sender, self.receiver):
            thread.shutdown(wait=False, cancel_futures=True)


class Pairs:
    """A rank is connected to those it has called `connect` for, which call it too."""

    def __init__(self, group: Coordination, secret: bytes) -> None:
        """Every rank makes one. `secret`: the job's; without one, ranks that met in one store are believed."""
        self._group = group
        nonce = group.broadcast(secrets.token_bytes(32) if group.rank == 0 else b"")
        self._place = f"pairs/{nonce.hex()[:16]}"
        """In the store, where an earlier one of this job may have left addresses that nobody listens at any more."""
        self._key = hmac.digest(secret or b"no secret", nonce, "sha256")
        self._links: dict[int, _Link] = {}
        self._came = threading.Condition()
        self._number = 0
        self._door: Door | None = None

    def connect(self, others: Sequence[int]) -> None:
        """The higher of two ranks calls the lower one, which listens meanwhile and no longer, so that strangers find no
        port in a rank that trains. Nobody waits in a circle."""
        own, until = self._group.rank, time.monotonic() + self._group.seconds
        wanted = sorted(set(others) - set(self._links))
        if self._door is None and any(other > own for other in wanted):
            address = own_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=128)
            self._door = Door(listener, self._key, f"{PURPOSE} {own}", self._serve, LONGEST)
            self._group.store.set(f"{self._place}/{own}", f"{address} {listener.getsockname()[1]}")
        try:
            for other in wanted:
                if other < own:
                    self._call(other, until)
            with self._came:
                if not self._came.wait_for(lambda: set(wanted) <= set(self._links), max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"rank {min(set(wanted) - set(self._links))} did not connect to copy its state")
        finally:
            if self._door is not None:
                self._door.close()
                self._door = None

    def break_off(self) -> None:
        """After a failure all ranks connect anew."""
        with self._came:
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._number += 1

    def send(self, content: Tensor, other: int) -> Work:
        """Work to wait for."""
        link = self._links[other]
        return Work(link.sender.submit(link.channel.send, as_bytes(content)))

    def receive(self, content: Tensor, other: int) -> Work:
        link = self._links[other]
        return Work(link.receiver.submit(link.channel.receive_into, as_bytes(content)))

    def _call(self, other: int, until: float) -> None:
        key = f"{self._place}/{other}"
        self._group.store.wait([key], timedelta(seconds=max(0.1, until - time.monotonic())))
        tried = ""
        while True:
            # An address from before, where nobody or another rank listens now, is followed by the one that holds.
            found = self._group.store.get(key).decode()
            address, port = found.split()
            try:
                line = socket.create_connection((address, int(port)), timeout=max(0.1, until - time.monotonic()))
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = greet(line, self._key, f"{PURPOSE} {other}", LONGEST)
                break
            except OSError as error:
                if time.monotonic() > until or (isinstance(error, Stranger) and found == tried):
                    raise
                tried = found if isinstance(error, Stranger) else ""
                time.sleep(0.05)
        # An attempt that failed may still be open at the other end, which then takes the one with the right number.
        channel.send(f"{self._number} {self._group.rank}".encode())
        with self._came:
            self._links[other] = _Link(channel, self._group.seconds)

    def _serve(self, channel: Channel) -> None:
        try:
            number, other = map(int, (channel.receive() or b"-1 -1").split())
        except (OSError, ValueError):
            return  # it died right after its greeting, and comes again if it lives
        with self._came:
            # Who was quicker to connect anew is taken as soon as this rank is so far.
            self._came.wait_for(lambda: self._number >= number, self._group.seconds)
            if number != self._number:
                return
            link = self._links[other] = _Link(channel, self._group.seconds)
            self._came.notify_all()
        link.ended.wait()
