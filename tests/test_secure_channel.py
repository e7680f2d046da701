"""Who knows the secret is heard, and nobody else: real sockets, and an attacker that sees and sends what it likes."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.secure_channel import (
    GREETING,
    MAGIC,
    NAME,
    PENDING,
    Channel,
    Door,
    Stranger,
    _origin,
    admit,
    given_secret,
    greet,
    make_secret,
    read_secret,
)

SECRET = b"0123456789abcdef0123456789abcdef"


def sent(*messages: bytes) -> list[bytes]:
    """What each of them is on the wire."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, found = Channel(ours, b"a", b"b", 100), []
        for message in messages:
            channel.send(message)
            found.append(theirs.recv(1 << 12))
        return found


def received(wire: bytes) -> list[bytes]:
    """What is heard of it, up to what is refused."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, found = Channel(ours, b"b", b"a", 100), []
        theirs.sendall(wire)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(Stranger):
            while (message := channel.receive()) is not None:
                found.append(message)
        return found


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_messages_arrive_as_they_were_sent(messages: list[bytes]) -> None:
    assert received(b"".join(sent(*messages))) == messages


@given(st.data())
def test_nothing_else_is_heard(data: st.DataObject) -> None:
    """Changed, lost, repeated, out of order, cut or forged: what was sent before it is heard, and nothing after it."""
    words = [b"one", b"two", b"three"]
    wire = sent(*words)
    at = data.draw(st.integers(0, 2))
    kind = data.draw(st.sampled_from(["flip", "lose", "repeat", "swap", "cut", "forge"]))
    if kind == "flip":
        changed = bytearray(wire[at])
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        wire[at] = bytes(changed)
    elif kind == "lose":
        at = min(at, 1)
        del wire[at]
    elif kind == "repeat":
        wire.insert(at + 1, wire[at])
        at += 1
    elif kind == "swap":
        at = min(at, 1)
        wire[at : at + 2] = reversed(wire[at : at + 2])
    elif kind == "cut":
        wire[at:] = [wire[at][: data.draw(st.integers(0, len(wire[at]) - 1))]]
    else:
        wire.insert(at, data.draw(st.binary(min_size=1, max_size=200)))
    assert received(b"".join(wire)) == words[:at]


def test_a_long_message_is_refused_before_it_is_read() -> None:
    assert received((1 << 31).to_bytes(4, "little") + bytes(32)) == []
    with pytest.raises(ValueError, match="longer than 100"):
        sent(bytes(101))


class Echo:
    """A door behind which what one says is said back."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.where = self.listener.getsockname()
        self.heard: list[bytes] = []
        self.channels: list[Channel] = []
        self.door = Door(self.listener, SECRET, "echo", self._serve)

    def _serve(self, channel: Channel) -> None:
        self.channels.append(channel)
        while message := channel.receive():
            self.heard.append(message)
            channel.send(message)

    def asked(self, message: bytes = b"hello") -> bytes | None:
        with socket.create_connection(self.where, timeout=60) as line:
            channel = greet(line, SECRET, "echo")
            channel.send(message)
            return channel.receive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.door.close()


def test_the_secret_opens_the_door_and_nothing_else_does(echo: Echo) -> None:
    assert echo.asked() == b"hello"
    for secret, purpose in ((b"x" * 32, "echo"), (SECRET, "store")):
        with socket.create_connection(echo.where) as line, pytest.raises(Stranger):
            greet(line, secret, purpose)
    with socket.create_connection(echo.where) as line:  # one that skips the server's proof, and guesses its own
        line.sendall(MAGIC + bytes(32) + bytes(32) + (5).to_bytes(4, "little") + bytes(32) + b"hello")
        with suppress(ConnectionError):
            while line.recv(1024):
                pass
    assert echo.heard == [b"hello"]


def test_one_who_listens_is_not_believed() -> None:
    """A stranger at the leader's address cannot pass for it, not even by saying back what it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def mirror() -> None:
            line, _ = listener.accept()
            with line:
                while part := line.recv(1024):
                    line.sendall(part[len(MAGIC) :] * 2)

        threading.Thread(target=mirror, daemon=True).start()
        with socket.create_connection(listener.getsockname()) as line, pytest.raises(Stranger):
            greet(line, SECRET, "echo")


def test_a_recorded_conversation_opens_nothing(echo: Echo) -> None:
    """Both directions of a real one are recorded by who sits on the wire, and sent again."""
    recorded: list[bytes] = []
    real = echo.where
    with socket.create_server(("127.0.0.1", 0)) as tap:

        def relay() -> None:
            line, _ = tap.accept()
            with line, socket.create_connection(real) as onward:
                back = threading.Thread(
                    target=lambda: [line.sendall(part) for part in iter(lambda: onward.recv(1024), b"")]
                )
                back.start()
                while part := line.recv(1024):
                    recorded.append(part)
                    onward.sendall(part)
                with suppress(OSError):
                    onward.shutdown(socket.SHUT_WR)
                back.join()

        tapping = threading.Thread(target=relay)
        tapping.start()
        echo.where = tap.getsockname()
        assert echo.asked(b"pay") == b"pay"
        tapping.join()
    with socket.create_connection(real) as line, suppress(ConnectionError):
        for part in recorded:
            line.sendall(part)
            line.settimeout(0.2)
            with suppress(TimeoutError):
                line.recv(1024)
    assert echo.heard == [b"pay"]


def test_a_thousand_who_say_nothing_keep_nobody_out(echo: Echo) -> None:
    with ExitStack() as held:
        for number in range(1000):
            line = held.enter_context(socket.create_connection(echo.where))
            if number % 3:  # junk, or half of a greeting
                with suppress(ConnectionError):
                    line.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 3 == 1 else MAGIC + bytes(7))
        seconds = []
        for _ in range(5):
            began = time.monotonic()
            assert echo.asked() == b"hello"
            seconds.append(time.monotonic() - began)
        assert min(seconds) < GREETING / 2, "nobody waits until strangers are sent away"
        assert len(echo.door._pending) <= PENDING
    limit = time.monotonic() + 60
    while echo.door._pending:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_flood_from_one_address_turns_away_itself(echo: Echo) -> None:
    """Who is slow to prove itself, as over a long line, is not the one to go."""
    with ExitStack() as held:
        honest = held.enter_context(socket.create_connection(echo.where, timeout=60))
        time.sleep(0.2)
        flood = [
            held.enter_context(socket.create_connection(echo.where, 60, source_address=("127.0.0.2", 0)))
            for _ in range(PENDING + 10)
        ]
        for line in flood[:5]:
            assert line.recv(1) == b"", "the oldest of them are turned away"
        channel = greet(honest, SECRET, "echo")
        channel.send(b"hello")
        assert channel.receive() == b"hello"


def test_where_a_connection_comes_from() -> None:
    addresses = ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "fe80::2", "2001:db8:1:2:3::4", ""]
    assert [_origin((address, 1)) for address in addresses] == [
        *("10.0.0.1", "10.0.0.1", "fe80::", "fe80::", "2001:db8:1:2::", "")
    ]


def test_both_ends_notice_a_line_that_was_cut(echo: Echo) -> None:
    """Nothing comes through it, not even its end: the system asks whether the other one is there, and ends it."""
    kept: list[socket.socket] = []
    with socket.create_connection(echo.where, timeout=60) as line:
        channel = greet(line, SECRET, "echo")
        channel.send(b"hello")
        assert channel.receive() == b"hello"
        kept += [channel._line, *(each._line for each in echo.channels)]
        assert len(kept) == 2
        for end in kept:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, interval, times = (end.getsockopt(socket.IPPROTO_TCP, name) for name in names)
            assert idle + interval * times <= 60


def test_a_door_outlives_a_moment_without_threads() -> None:
    """In a process that may have no more memory: the one who knocks then is turned away, and the next is heard."""
    heard, told = os.pipe()
    child = os.fork()
    if not child:
        listener = socket.create_server(("127.0.0.1", 0))
        Door(listener, SECRET, "echo", lambda channel: channel.send(b"hello"))
        threading.stack_size(256 << 20)  # of a smaller one there may be room left
        limits = resource.getrlimit(resource.RLIMIT_AS)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 20), limits[1]))
        os.write(told, b"%d\n" % listener.getsockname()[1])
        time.sleep(1)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        time.sleep(60)
        os._exit(0)
    where = ("127.0.0.1", int(os.read(heard, 20)))
    try:
        with socket.create_connection(where, timeout=10) as line, pytest.raises(OSError):
            greet(line, SECRET, "echo")
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(where, timeout=10) as line:
                assert greet(line, SECRET, "echo").receive() == b"hello"
                break
        else:
            raise AssertionError("nobody is at the door any more")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_who_is_too_slow_is_sent_away() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told: Queue[str] = Queue()

        def wait() -> None:
            try:
                admit(theirs, SECRET, "echo", seconds=0.3)
            except OSError as error:
                told.put(type(error).__name__)

        threading.Thread(target=wait, daemon=True).start()
        for byte in MAGIC:  # one byte now and then
            with suppress(OSError):
                ours.sendall(bytes([byte]))
            time.sleep(0.1)
        assert told.get(timeout=60) == "TimeoutError"


def test_secrets_come_from_a_variable_a_file_or_the_run_folder(tmp_path: Path) -> None:
    made = make_secret(tmp_path / "run")
    path = tmp_path / "run" / NAME
    assert make_secret(tmp_path / "run") == made == read_secret(path) and len(made) == 64
    assert path.stat().st_mode & 0o777 == 0o600 and [each.name for each in path.parent.iterdir()] == [NAME]
    assert given_secret({}) is None
    assert given_secret({"CUBOID_SECRET": " " + "s" * 40 + "\n"}) == b"s" * 40
    assert given_secret({"CUBOID_SECRET_FILE": str(path)}) == made


def test_secrets_that_others_know_are_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    make_secret(tmp_path)
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"is not a file that its user alone may read; use chmod 600 or CUBOID_SECRET$"):
        read_secret(path)
    with pytest.raises(
        UserError, match=r"^CUBOID_SECRET has a secret of 6 characters, which can be guessed; use 32 or"
    ):
        given_secret({"CUBOID_SECRET": "secret"})
    with pytest.raises(UserError, match="cannot be read: No such file"):
        given_secret({"CUBOID_SECRET_FILE": str(tmp_path / "nowhere")})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="is not a file that its user alone may read"):
        read_secret(tmp_path / "pipe")
