"""The coordinator on the network: messages of JSON between the leader and every supervisor, its own included, all of
which know the job's secret.

A supervisor says what it is doing when that changes and every second; the leader answers, with the order that holds if
that is another one, and says a new one to all at once."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from cuboid.console import say
from cuboid.errors import UserError
from cuboid.launch.coordinator import Coordinator, Order, Status
from cuboid.launch.network import Endpoint
from cuboid.resilience.rebalance import Pace
from cuboid.secure_channel import VALUE, Channel, Door, Stranger, greet

BEAT = 1.0
LOOK = BEAT / 4
"""Seconds between two decisions of the leader."""
FAILING = 300.0
"""Seconds for which the leader's folder, or its checkpoints' store, may fail before the job is ended."""
PURPOSE = "coordinator"
OTHER_RUN = "this node has another run file, or other options, than the others; start all nodes with the same command"
UNTRUSTED = 90.0
"""Seconds after which a node that has met none but strangers where it should meet the leader says so; a network file
system may show a new file a minute late."""


class CoordinatorServer:
    """The leader's end."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        coordinator: Coordinator,
        run: str,
        announce: Callable[[Order], None],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`run` tells one run from others: a supervisor with another one is sent away. `leads`: whether this node may
        decide; one that slept does not know before it has looked."""
        self._leads = leads
        self._coordinator, self._run, self._announce = coordinator, run, announce
        self._lock = threading.Lock()
        self._lines: dict[str, Channel] = {}
        self._open = True
        self._fails_since: float | None = None
        self._door = Door(listener, secret, PURPOSE, self._serve)
        threading.Thread(target=self._decide, daemon=True).start()

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
        self._door.close()

    def stop_leading(self) -> None:
        """Another leads: nothing more is said, and everybody looks for it, also who connects just now."""
        self._open = False  # first: a line is noted before `_serve` looks at this, so that none is missed by both
        self._door.close()
        for line in list(self._lines.values()):
            line.hang_up()

    def meet_at(self, address: str, port: int) -> None:
        with self._lock:
            self._coordinator.meet_at(address, port)

    def _decide(self) -> None:
        while self._open:
            if not self._leads():
                time.sleep(LOOK)
                continue
            with self._lock:
                before = self._coordinator.order
                try:
                    self._coordinator.decide(time.monotonic())
                except UserError as error:
                    self._coordinator.end(2, str(error))
                except OSError as error:
                    self._bear(error)
                except Exception as error:  # nobody else would ever say why the job stands still
                    self._coordinator.end(1, f"the leading node failed: {error!r}")
                else:
                    self._fails_since = None
                if self._coordinator.order != before:
                    self._say()
                for node in set(self._lines) - set(self._coordinator.nodes):  # of the lost nothing more will be heard
                    self._lines.pop(node).hang_up()
            time.sleep(LOOK)

    def _bear(self, error: OSError) -> None:
        """A folder, or the store of checkpoints, may answer at the next look."""
        now = time.monotonic()
        if self._fails_since is None:
            self._fails_since = now
            with suppress(OSError):
                say(f"nothing is decided until this works again: {error}", as_warning=True)
        if now - self._fails_since > FAILING:
            self._coordinator.end(1, f"for {FAILING:g} s nothing could be decided: {error}")

    def _say(self) -> None:
        order = self._coordinator.order
        self._announce(order)
        for line in list(self._lines.values()):
            with suppress(OSError):  # who cannot be reached is found to be lost
                line.send(_encode(asdict(order)))

    def _serve(self, line: Channel) -> None:
        node = ""
        try:
            line.send_no_longer_than(2)  # an answer that a cut-off node does not take must not keep others waiting
            while text := line.receive():
                word = json.loads(text)
                if word["run"] != self._run:
                    line.send(_encode({"refused": OTHER_RUN}))
                    return
                with self._lock:
                    node = str(word["node"])
                    self._lines[node] = line
                    if not self._open:
                        return
                    status, order = _status(word["status"]), self._coordinator.order
                    self._coordinator.hear(node, status, time.monotonic())
                    # Who has the order is only told that the leader lives: of many nodes the order is long.
                    line.send(_encode({} if status.order == order.number else asdict(order)))
        except (OSError, ValueError, TypeError, KeyError):
            pass  # a broken connection, or another version
        finally:
            with self._lock:
                if self._lines.get(node) is line:
                    del self._lines[node]
                    self._coordinator.leave(node, time.monotonic())


class CoordinatorClient:
    """A supervisor's end: it connects again and again, for as long as it is open."""

    def __init__(
        self,
        where: Callable[[], Sequence[Endpoint]],
        secret: Callable[[], bytes | None],
        node: str,
        run: str,
        lost_after: float,
    ) -> None:
        """`where`: places where the leader may be, the likeliest first. `secret`: None where there is none yet.
        After `lost_after` seconds without a word contact is lost."""
        self.order: Order | None = None
        self.refused = ""
        self._where, self._node, self._run, self._limit = where, node, run, lost_after
        self._secret = secret
        self._strange: float | None = None
        self._status = Status()
        self._heard = time.monotonic()
        self._line: Channel | None = None
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
            line.hang_up()

    def forget(self) -> None:
        """Whoever led leads no more: contact is lost until another is heard."""
        self._heard = time.monotonic() - self._limit - BEAT

    def _keep(self) -> None:
        while self._open:
            for endpoint in self._where():
                # What is suppressed: nobody is there, a broken connection, or another version.
                with suppress(OSError, ValueError, TypeError):
                    self._connect(endpoint)
                    break  # they have spoken: the likeliest place is tried first again
            self._line = None
            if self.lost and self._open and not self._noted:
                self._noted = True
                say(f"nothing is heard from the leading node at {self._where()[0]}; waiting for it", as_warning=True)
            time.sleep(BEAT / 4)

    def _connect(self, endpoint: Endpoint) -> None:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=3 * BEAT) as line:
            try:
                if (secret := self._secret()) is None:
                    raise Stranger("this node has no secret")
                channel = greet(line, secret, PURPOSE)
            except Stranger:
                self._meet_stranger(endpoint)
                raise
            except UserError as error:
                self._refuse(str(error))
                return
            self._strange = None
            channel.wait_no_longer_than(BEAT)
            self._line = channel
            self._talk(channel)

    def _meet_stranger(self, endpoint: Endpoint) -> None:
        """Who has spoken to the leader before waits for it: whoever sits at its port now is somebody else."""
        self._strange = time.monotonic() if self._strange is None else self._strange
        if self.order is None and time.monotonic() - self._strange > UNTRUSTED:
            why = "has another job secret than this node" if self._secret() else "has a job secret and this node none"
            self._refuse(
                f"the leading node at {endpoint} {why}, because they do not see the same run folder; give all "
                f"nodes the same {VALUE}"
            )

    def _refuse(self, why: str) -> None:
        with self._news:
            self.refused = why
            self._news.notify_all()

    def _talk(self, line: Channel) -> None:
        connected, sent = time.monotonic(), 0.0
        while self._open and not self.refused:
            now = time.monotonic()
            # After a cut the system waits longer and longer before it tries an old connection again.
            if now - max(self._heard, connected) > self._limit:
                return
            if now - sent >= BEAT:
                self._send()
                sent = now
            try:
                word = line.receive()
            except TimeoutError:
                continue
            if word is None:
                return
            self._take(json.loads(word))

    def _take(self, word: dict[str, Any]) -> None:
        with self._news:
            if "refused" in word:
                self.refused = str(word["refused"])
            elif word:
                order = Order(**{**word, "members": tuple(word["members"])})
                if self.order is not None and order.term < self.order.term:
                    raise Stranger("it led once, and does not know yet that another does")
                self.order = order
            self._heard, self._noted = time.monotonic(), False
            self._news.notify_all()

    def _send(self) -> None:
        if (line := self._line) is not None:
            with suppress(OSError):
                line.send(_encode({"node": self._node, "run": self._run, "status": asdict(self._status)}))


def _status(table: dict[str, Any]) -> Status:
    pace = table.pop("pace", None)
    return Status(**table, pace=None if pace is None else Pace(**pace))


def _encode(word: dict[str, object]) -> bytes:
    return json.dumps(word).encode()
