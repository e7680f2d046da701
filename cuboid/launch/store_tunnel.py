"""The ranks' store, out of reach of strangers. PyTorch's TCPStore believes whoever connects, so it listens on loopback
alone; ranks of other nodes reach it through their supervisor and one connection that knows the job's secret.

    rank -> 127.0.0.1 of its node -> supervisor  ==[channel]==>  leading supervisor -> 127.0.0.1 of its node -> store

Many connections of ranks travel in one channel: each message is the number of a connection and its next bytes; no
bytes: it ended."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuboid.errors import RankError, UserError
from cuboid.launch.network import Endpoint, is_loopback, listen
from cuboid.secure_channel import VALUE, Channel, Door, Stranger, greet

PURPOSE = "store"
PART = 1 << 18
"""Bytes of a connection in one message."""
LONGEST = PART + 4


class _Bundle:
    """One end of a channel, and the connections of this machine that travel in it."""

    def __init__(self, channel: Channel, connect: Callable[[], socket.socket] | None) -> None:
        """`connect`: makes the connection of this end when one of the other end has begun; None: none begins there."""
        self._channel, self._connect = channel, connect
        self._lines: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._open = True
        threading.Thread(target=self._send, daemon=True).start()

    def add(self, number: int, line: socket.socket) -> None:
        """One that comes when the channel has ended is closed, so that who waits at its other end is told."""
        with suppress(OSError, ValueError):  # of what has been closed since
            # Short questions, each of which waits for an answer.
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._lines[number] = line
                self._selector.register(line, selectors.EVENT_READ, number)
            self._wake.send(b"x")  # who waits in select sees it only now
        if not self._open:
            self._end(number)

    def receive(self) -> None:
        """Until the channel ends; then all connections of this end do."""
        try:
            while (message := self._channel.receive()) is not None:
                number, content = int.from_bytes(message[:4], "little"), message[4:]
                line = self._lines.get(number)
                if line is None and content and self._connect is not None:
                    line = self._connect()
                    self.add(number, line)
                if line is None:
                    continue
                try:
                    line.sendall(content)
                    if not content:
                        line.shutdown(socket.SHUT_WR)
                except OSError:
                    self._end(number)
        except OSError:
            pass  # the other end is gone
        finally:
            self._open = False
            for number in list(self._lines):
                self._end(number)
            with suppress(OSError):
                self._wake.send(b"x")

    def _send(self) -> None:
        while self._open:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(64)
                    continue
                try:
                    content = key.fileobj.recv(PART, socket.MSG_DONTWAIT)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue  # another connection has got the number of one that ended just now
                except OSError:
                    content = b""
                with suppress(OSError):  # the channel has ended; so do all connections, in `receive`
                    self._channel.send(key.data.to_bytes(4, "little") + content)
                if not content:
                    self._end(key.data)
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _end(self, number: int) -> None:
        with self._lock:
            line = self._lines.pop(number, None)
            if line is not None:
                with suppress(OSError, KeyError, ValueError):
                    self._selector.unregister(line)
                line.close()


class StoreGate:
    """The leading node's end: who knows the secret reaches the store at `port` of loopback."""

    def __init__(self, listener: socket.socket, secret: bytes, port: int) -> None:
        self._port = port
        self._channels: set[Channel] = set()
        self._door = Door(listener, secret, PURPOSE, self._serve, LONGEST)

    def close(self) -> None:
        self._door.close()
        for channel in list(self._channels):
            channel.hang_up()

    def _serve(self, channel: Channel) -> None:
        self._channels.add(channel)
        try:
            _Bundle(channel, lambda: socket.create_connection(("127.0.0.1", self._port))).receive()
        finally:
            self._channels.discard(channel)


class StoreTunnel:
    """Another node's end, for one attempt: its ranks find the store at `port` of loopback."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        line = socket.create_connection((address, port), timeout=10)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line, self._channel = line, greet(line, secret, PURPOSE, LONGEST)
        self._bundle = _Bundle(self._channel, None)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._open = True
        for work in (self._receive, self._accept):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._channel.hang_up()
        self._line.close()

    def _receive(self) -> None:
        self._bundle.receive()
        self.close()  # a rank that comes later finds nobody, and is told so at once

    def _accept(self) -> None:
        number = 0
        while self._open:
            with suppress(OSError):
                line, _ = self._listener.accept()
                number += 1
                self._bundle.add(number, line)


class MeetingStore:
    """Where the nodes of a job that is done once meet, and their ranks: at `host`, `port`, as this node reaches it."""

    def __init__(self, listener: socket.socket | None, where: Endpoint, secret: bytes | None, patience: float) -> None:
        """`listener`: at `where`, on the node that serves the store. On loopback a job needs no secret."""
        from cuboid.launch.rendezvous import serve_store

        self.host, self.port = where.host, where.port
        self.served: Any = None
        self._end: StoreGate | StoreTunnel | None = None
        if secret is None and not is_loopback(where.host):
            raise UserError(
                f"rendezvous={where} is open to others, and this node knows no job secret; set {VALUE} to the same "
                "value on every node, such as `openssl rand -hex 32` makes"
            )
        if secret is None:
            self.served = serve_store(listener) if listener is not None else None
        elif listener is not None:
            inside = listen("127.0.0.1", 0)
            self.host, self.port = "127.0.0.1", inside.getsockname()[1]
            self.served = serve_store(inside)
            self._end = StoreGate(listener, secret, self.port)
        else:
            self._end = _reach(where, secret, time.monotonic() + patience)
            self.host, self.port = "127.0.0.1", self._end.port

    def close(self) -> None:
        if self._end is not None:
            self._end.close()
        self.served = None


def _reach(where: Endpoint, secret: bytes, until: float) -> StoreTunnel:
    """The node that serves the store may be the last to start."""
    while True:
        try:
            return StoreTunnel(where.host, where.port, secret)
        except Stranger:
            raise UserError(f"rendezvous={where} has another job secret; set the same {VALUE} on every node") from None
        except OSError:
            if time.monotonic() > until:
                raise RankError(f"rendezvous={where} did not answer in time; start that node too") from None
            time.sleep(0.2)
