"""What owners of one island ask those of another, over TCP between processes that know the job's secret: the blocks
that an island sends in a round, or its outer weights and momentum, for one that joins.

Whoever needs blocks asks for them, and after a broken connection for those that are still missing. So nothing is sent
twice, nobody keeps more than a few rounds, and an island that is gone is missed by those who ask."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cuboid.secure_channel import Channel, Door, greet
from cuboid.spec.block_owners import ANSWER, FRAME, PART, REQUEST, Blocks

PURPOSE = "islands"
ASK = struct.Struct("<4sIQIIQ")
"""What is asked for, of which fragment, round, first block, the one behind the last, nothing."""
HEAD = struct.Struct("<QQQ")
"""How it is answered, of which round, in how many bytes."""
SENT, STATE = b"sent", b"outr"
HERE, LATER, GONE = 0, 1, 2
HOLD = 2.0
"""Seconds for which a question waits at the other end for what is not there yet."""
SILENCE = 20.0
"""Seconds without a byte after which a connection is made anew."""
PATIENCE = 60.0
"""Seconds for which one island tries to reach another one."""
assert (ASK.size, HEAD.size) == (REQUEST, ANSWER)


class Gone(Exception):
    """What was asked for is not there any more: it belongs to an earlier round."""


class Abandoned(Exception):
    """Nobody waits for it any more."""


class Counts:
    """Bytes of this rank on the slow link, with the framing of every message."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._lock = threading.Lock()

    def add(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self.sent += sent
            self.received += received


class Held:
    """Blocks that others may ask for: (blocks, bytes) of certain runs of them."""

    def __init__(self, runs: tuple[Blocks, ...], wire: Tensor) -> None:
        self.runs, self.wire = runs, wire
        assert sum(stop - first for first, stop in runs) == len(wire)

    def part(self, first: int, stop: int) -> Tensor | None:
        """None: not all of them are here."""
        place = 0
        for low, high in self.runs:
            if low <= first and stop <= high:
                return self.wire[place + first - low : place + stop - low]
            place += high - low
        return None


class Outbox:
    """What this rank has for others: what it sent in each of the latest rounds, and its outer state."""

    def __init__(self, keep: int, state: Callable[[int], tuple[int, Held]]) -> None:
        """`keep`: rounds. `state`: of a fragment, with the round that it follows."""
        self._keep, self._state = keep, state
        self._rounds: dict[int, Held] = {}
        self._first = 0
        self._news = threading.Condition()

    def put(self, round_: int, held: Held) -> None:
        with self._news:
            self._rounds[round_] = held
            self._first = max(self._first, round_ - self._keep + 1)
            for old in [each for each in self._rounds if each < self._first]:
                del self._rounds[old]
            self._news.notify_all()

    def start_at(self, round_: int) -> None:
        """Nothing from before is here."""
        with self._news:
            self._first = round_

    def find(self, kind: bytes, fragment: int, round_: int) -> tuple[int, Held | None]:
        """How to answer, and with what."""
        if kind == STATE:
            until = time.monotonic() + HOLD
            while (found := self._state(fragment))[0] < round_ and time.monotonic() < until:
                time.sleep(0.05)
            return (LATER, None) if found[0] < round_ else found
        with self._news:
            self._news.wait_for(lambda: round_ in self._rounds or round_ < self._first, HOLD)
            if round_ in self._rounds:
                return round_, self._rounds[round_]
            return (GONE if round_ < self._first else LATER), None


class LinkServer:
    """Answers owners of other islands."""

    def __init__(self, address: str, secret: bytes, outbox: Outbox, counts: Counts) -> None:
        self._outbox, self._counts = outbox, counts
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=256)
        self.port = int(listener.getsockname()[1])
        self._lines: set[Channel] = set()
        self._door = Door(listener, secret, PURPOSE, self._serve, longest=PART, most=1 << 12)

    def close(self) -> None:
        self._door.close()
        for line in list(self._lines):
            line.hang_up()

    def wait_until_left(self) -> None:
        """Once it is closed: until nobody is answered any more, or soon."""
        until = time.monotonic() + HOLD
        while self._lines and time.monotonic() < until:
            time.sleep(0.01)

    def _serve(self, line: Channel) -> None:
        self._lines.add(line)
        try:
            line.send_no_longer_than(int(SILENCE))
            while (question := line.receive()) is not None:
                self._answer(line, question)
        except (OSError, struct.error):
            pass  # it asks again, if it still wants to know
        finally:
            self._lines.discard(line)

    def _answer(self, line: Channel, question: bytes) -> None:
        kind, fragment, round_, first, stop, _ = ASK.unpack(question)
        if kind not in (SENT, STATE):
            raise OSError("a question of another version")
        status, held = self._outbox.find(kind, fragment, round_)
        blocks = None if held is None else held.part(first, stop)
        if blocks is None:
            line.send(HEAD.pack(LATER if held is None and status == LATER else GONE, 0, 0))
            return
        line.send(HEAD.pack(HERE, status, blocks.numel()))
        self._counts.add(sent=ANSWER + FRAME, received=REQUEST + FRAME)
        step = max(PART // blocks.shape[1], 1)
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step].contiguous()
            line.send(as_bytes(part))
            self._counts.add(sent=part.numel() + FRAME)


class Link:
    """To one owner of another island; used by one thread at a time."""

    def __init__(self, host: str, port: int, secret: bytes, counts: Counts) -> None:
        self._host, self._port, self._secret, self._counts = host, port, secret, counts
        self._line: Channel | None = None
        self._failing: float | None = None

    def close(self) -> None:
        if self._line is not None:
            self._line.hang_up()
            self._line.close()
            self._line = None

    def fetch(
        self,
        kind: bytes,
        fragment: int,
        round_: int,
        run: Blocks,
        into: Tensor,
        wanted: Callable[[], bool],
        patience: float = PATIENCE,
    ) -> int:
        """Fill (blocks, bytes) with a run of blocks; returns the round that the other end says they belong to. Tries
        again until it has them, they are `Gone`, nobody waits, or the other end was out of reach for so many seconds
        (`Abandoned`). A state that is not there yet is `Gone` as well: another island may have it."""
        done, version = 0, -1
        while done < len(into):
            if not wanted():
                raise Abandoned
            try:
                line = self._connected()
                line.send(ASK.pack(kind, fragment, round_, run[0] + done, run[1], 0))
                status, found, size = HEAD.unpack(line.receive() or b"")
                self._failing = None
                if status == LATER and kind == SENT:
                    continue
                if status != HERE:
                    raise Gone(f"round {round_} is over at {self._host}:{self._port}")
                if size != into[done:].numel() or (version not in (-1, found)):
                    raise Gone("it has moved on meanwhile")
                version = found
                self._counts.add(sent=REQUEST + FRAME, received=ANSWER + FRAME)
                step = max(PART // into.shape[1], 1)
                while done < len(into):
                    part = into[done : done + step]
                    line.receive_into(as_bytes(part))
                    self._counts.add(received=part.numel() + FRAME)
                    done += len(part)
            except (OSError, struct.error):
                self.close()
                self._failing = time.monotonic() if self._failing is None else self._failing
                if time.monotonic() - self._failing > patience:
                    self._failing = None
                    raise Abandoned from None
                time.sleep(0.1)
        return version

    def _connected(self) -> Channel:
        if self._line is None:
            line = socket.create_connection((self._host, self._port), timeout=SILENCE)
            with suppress(OSError):
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._line = greet(line, self._secret, PURPOSE, longest=PART)
            except OSError:
                line.close()
                raise
            self._line.wait_no_longer_than(SILENCE)
        return self._line


def as_bytes(wire: Tensor) -> memoryview:
    """The memory of a contiguous tensor of bytes."""
    content: Any = wire.numpy()
    return memoryview(content).cast("B")


def as_wire(values: Tensor) -> Tensor:
    """(blocks, numbers) as (blocks, bytes)."""
    return values.contiguous().view(torch.uint8)
