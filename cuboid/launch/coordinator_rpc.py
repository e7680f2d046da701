"""The coordinator on the network: lines of JSON between the leader and every supervisor, its own included.

A supervisor says what it is doing when that changes and every second; the leader answers, with the order that holds if
that is another one, and says a new one to all at once."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from cuboid.console import say
from cuboid.errors import UserError
from cuboid.launch.coordinator import Coordinator, Order, Status
from cuboid.launch.network import Endpoint

BEAT = 1.0
LONGEST = 1 << 16
"""Bytes of a line; whoever sends a longer one is no supervisor."""


class CoordinatorServer:
    """The leader's end."""

    def __init__(
        self, listener: socket.socket, coordinator: Coordinator, run: str, announce: Callable[[Order], None]
    ) -> None:
        """`run` tells one run from others: a supervisor with another one is sent away."""
        self._listener, self._coordinator, self._run, self._announce = listener, coordinator, run, announce
        self._lock = threading.Lock()
        self._lines: dict[str, socket.socket] = {}
        self._open = True
        for work in (self._accept, self._decide):
            threading.Thread(target=work, daemon=True).start()

    def end(self, status: int, reason: str, patience: float) -> None:
        """The last word, unless it was said; then wait until all have heard it and left."""
        with self._lock:
            if self._coordinator.order.task != "end":
                self._coordinator.end(status, reason)
                self._say()
        until = time.monotonic() + patience
        while self._lines and time.monotonic() < until:
            time.sleep(0.05)
        self._open = False
        self._listener.close()

    def meet_at(self, address: str, port: int) -> None:
        with self._lock:
            self._coordinator.meet_at(address, port)

    def _decide(self) -> None:
        while self._open:
            with self._lock:
                before = self._coordinator.order
                try:
                    self._coordinator.decide(time.monotonic())
                except UserError as error:
                    self._coordinator.end(2, str(error))
                except Exception as error:  # nobody else would ever say why the job stands still
                    self._coordinator.end(1, f"the leading node failed: {error!r}")
                if self._coordinator.order != before:
                    self._say()
                for node in set(self._lines) - set(self._coordinator.nodes):  # of the lost nothing more will be heard
                    _hang_up(self._lines.pop(node))
            time.sleep(BEAT / 4)

    def _say(self) -> None:
        order = self._coordinator.order
        self._announce(order)
        for line in list(self._lines.values()):
            with suppress(OSError):  # who cannot be reached is found to be lost
                line.sendall(_encode(asdict(order)))

    def _accept(self) -> None:
        while self._open:
            with suppress(OSError):
                line, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        node = ""
        try:
            # An answer that a cut-off node does not take must not keep the others waiting.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
            with line.makefile("rb") as said:
                while text := said.readline(LONGEST):
                    word = json.loads(text)
                    if word["run"] != self._run:
                        line.sendall(
                            _encode({"refused": "this node has another run file, or other options, than the others"})
                        )
                        return
                    with self._lock:
                        node = str(word["node"])
                        self._lines[node] = line
                        status, order = Status(**word["status"]), self._coordinator.order
                        self._coordinator.hear(node, status, time.monotonic())
                        # Who has the order is only told that the leader lives: of many nodes the order is long.
                        line.sendall(_encode({} if status.order == order.number else asdict(order)))
        except (OSError, ValueError, TypeError, KeyError):
            pass  # a broken connection, or a stranger
        finally:
            with self._lock:
                if self._lines.get(node) is line:
                    del self._lines[node]
                    self._coordinator.leave(node, time.monotonic())
            line.close()


class CoordinatorClient:
    """A supervisor's end: it connects again and again, for as long as it is open."""

    def __init__(self, endpoint: Endpoint, node: str, run: str, lost_after: float) -> None:
        """After `lost_after` seconds without a word contact is lost."""
        self.order: Order | None = None
        self.refused = ""
        self._endpoint, self._node, self._run, self._limit = endpoint, node, run, lost_after
        self._status = Status()
        self._heard = time.monotonic()
        self._line: socket.socket | None = None
        self._news = threading.Condition()
        self._noted = False
        self._open = True
        threading.Thread(target=self._keep, daemon=True).start()

    @property
    def silence(self) -> float:
        """Seconds since the leader was heard."""
        return time.monotonic() - self._heard

    @property
    def lost(self) -> bool:
        return self.silence > self._limit

    def tell(self, status: Status) -> None:
        self._status = status
        self._send()

    def next(self, after: int | None, patience: float, stop: Callable[[], bool]) -> Order | None:
        """The first order that is not `after`; nothing if it refused, was silent for too long, or is to `stop`."""
        with self._news:
            while not self.refused and self.silence < patience and not stop():
                if self.order is not None and self.order.number != after:
                    return self.order
                self._news.wait(BEAT)
        return None

    def close(self) -> None:
        self._open = False
        if (line := self._line) is not None:
            _hang_up(line)

    def _keep(self) -> None:
        while self._open:
            where = (self._endpoint.host, self._endpoint.port)
            # What is suppressed: nobody is there, or a stranger.
            with suppress(OSError, ValueError, TypeError), socket.create_connection(where, timeout=3 * BEAT) as line:
                line.settimeout(BEAT)
                self._line = line
                self._talk(line)
            self._line = None
            if self.lost and self._open and not self._noted:
                self._noted = True
                say(f"nothing is heard from the leading node at {self._endpoint}; waiting for it", as_warning=True)
            time.sleep(BEAT / 4)

    def _talk(self, line: socket.socket) -> None:
        connected, sent, text = time.monotonic(), 0.0, b""
        while self._open and not self.refused:
            now = time.monotonic()
            # After a cut the system waits longer and longer before it tries an old connection again.
            if now - max(self._heard, connected) > self._limit:
                return
            if now - sent >= BEAT:
                self._send()
                sent = now
            try:
                part = line.recv(LONGEST)
            except TimeoutError:
                continue
            if not part:
                return
            *words, text = (text + part).split(b"\n")
            for word in words:
                self._take(json.loads(word))

    def _take(self, word: dict[str, Any]) -> None:
        with self._news:
            if "refused" in word:
                self.refused = str(word["refused"])
            elif word:
                self.order = Order(**{**word, "members": tuple(word["members"])})
            self._heard, self._noted = time.monotonic(), False
            self._news.notify_all()

    def _send(self) -> None:
        if (line := self._line) is not None:
            with suppress(OSError):
                line.sendall(_encode({"node": self._node, "run": self._run, "status": asdict(self._status)}))


def _hang_up(line: socket.socket) -> None:
    """Whoever reads from it reads its end."""
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _encode(word: dict[str, object]) -> bytes:
    return json.dumps(word).encode() + b"\n"
