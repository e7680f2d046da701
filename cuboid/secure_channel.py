"""Messages between processes that know the job's secret, over TCP; strangers are turned away.

Both ends prove with HMAC-SHA256 over fresh nonces that they know the secret, which itself never travels. Keys of the
connection, one for each direction, follow from secret and nonces. Each message is its length, a tag and the content;
the tag covers the number of the message, so that one that is forged, changed, repeated, lost or out of order ends the
connection. Nothing is encrypted: who can read the wire reads the messages.

    client                                   server
    MAGIC, nonce                 ->
                                 <-          nonce, proof of the server
    proof of the client          ->
    length, tag, content         <->         length, tag, content"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cuboid.errors import UserError

MAGIC = b"cuboid-1"
NONCE = TAG = 32
LONGEST = 1 << 20
"""Bytes of a message, unless told otherwise."""
GREETING = 5.0
"""Seconds in which whoever connects must have proved itself."""
PENDING = 64
"""Connections that have proved nothing yet; one more ends the oldest of whoever has most of them."""
QUIET, ASKED, TIMES = 20, 10, 4
"""Seconds without a word after which the other machine is asked whether it is there, how often, and how many times
before the connection ends: a cable that is cut says nothing, and who only listens would wait for ever."""


class Stranger(OSError):
    """The other end does not know the secret, or what came from it is not what was sent."""


# The secret.

VALUE, FILE = "CUBOID_SECRET", "CUBOID_SECRET_FILE"
SHORTEST = 32
"""Characters: who records a greeting can try secrets at leisure."""
NAME = "secret"
"""Of its file in the run's folder, where nobody passed one."""


def new_secret() -> str:
    return secrets.token_hex(32)


def given_secret(environment: Mapping[str, str]) -> bytes | None:
    """What a launcher passed as a variable or a file, if it did."""
    if text := environment.get(VALUE, "").strip():
        return _checked(text, VALUE)
    if path := environment.get(FILE, ""):
        return read_secret(Path(path))
    return None


def found_secret(environment: Mapping[str, str], folder: Path) -> bytes | None:
    """What a launcher passed, or what the leading node made in the run's folder; None: there is none yet."""
    path = folder / NAME
    return given_secret(environment) or (read_secret(path) if path.exists() else None)


def read_secret(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"the job's secret {path} cannot be read: {error.strerror}; see docs/security.md") from None
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise UserError(
                f"the job's secret {path} is not a file that its user alone may read; use chmod 600 or {VALUE}"
            )
        text = file.read(4096).decode("utf-8", "replace").strip()
    return _checked(text, str(path))


def _checked(text: str, where: str) -> bytes:
    if len(text) < SHORTEST:
        raise UserError(
            f"{where} has a secret of {len(text)} characters, which can be guessed; use {SHORTEST} or more, as "
            "`openssl rand -hex 32` makes"
        )
    return text.encode()


def make_secret(folder: Path) -> bytes:
    """That of the run's folder, made if need be: a file that its user alone may read."""
    path = folder / NAME
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            aside = folder / f".{NAME}.{secrets.token_hex(4)}"
            try:
                with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(new_secret() + "\n")
                with suppress(FileExistsError):  # whoever was first has made it, and nobody reads half of it
                    os.link(aside, path)
            finally:
                aside.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}; use another folder, or {VALUE}") from None
    return read_secret(path)


# A connection.


class Channel:
    """Messages over a connection whose ends have proved themselves. Several threads may send, one may receive."""

    covers_content = True
    """Whether tags cover the content too. Both ends may agree that they do not, for gigabytes that are compared by a
    checksum which travels elsewhere: SHA-256 takes longer than the network where the processor has no help for it."""

    def __init__(self, line: socket.socket, sending: bytes, receiving: bytes, longest: int) -> None:
        self._line, self._longest = line, longest
        self._keys, self._numbers = (sending, receiving), [0, 0]
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def send(self, content: bytes | memoryview) -> None:
        """A message that was sent in part only could not be told from the next: the connection ends."""
        if len(content) > self._longest:
            raise ValueError(f"a message of {len(content)} bytes is longer than {self._longest}")
        try:
            with self._lock:
                size = len(content).to_bytes(4, "little")
                head = size + self._tag(0, size, content)
                if len(content) > 1 << 16:  # not worth a copy
                    self._line.sendall(head)
                    self._line.sendall(content)
                else:
                    self._line.sendall(head + content)
        except OSError:
            self.hang_up()
            raise

    def receive(self) -> bytes | None:
        """The next message; nothing when the other end has left. After a `TimeoutError` it may be called again."""
        if not self._fill(4 + TAG):
            return None
        size = int.from_bytes(self._buffer[:4], "little")
        if size > self._longest:
            self.hang_up()
            raise Stranger(f"a message of {size} bytes is announced, and {self._longest} are the most")
        if not self._fill(4 + TAG + size):
            return None
        content = bytes(memoryview(self._buffer)[4 + TAG : 4 + TAG + size])
        if not hmac.compare_digest(self._tag(1, self._buffer[:4], content), self._buffer[4 : 4 + TAG]):
            self.hang_up()
            raise Stranger("a message is not what was sent")
        del self._buffer[: 4 + TAG + size]
        return content

    def receive_into(self, content: memoryview) -> None:
        """A message of exactly this size, without a copy. `ConnectionError`: the other end has left."""
        if not self._fill(4 + TAG):
            raise ConnectionError("the other end has left")
        size, tag = bytes(self._buffer[:4]), bytes(self._buffer[4 : 4 + TAG])
        if (announced := int.from_bytes(size, "little")) != len(content):
            self.hang_up()
            raise Stranger(f"a message of {announced} bytes came, and {len(content)} were expected")
        have = min(len(content), len(self._buffer) - 4 - TAG)
        content[:have] = self._buffer[4 + TAG : 4 + TAG + have]
        del self._buffer[: 4 + TAG + have]
        while have < len(content):
            if not (count := self._line.recv_into(content[have:])):
                raise ConnectionError("the other end has left")
            have += count
        if not hmac.compare_digest(self._tag(1, size, content), tag):
            self.hang_up()
            raise Stranger("a message is not what was sent")

    def wait_no_longer_than(self, seconds: float | None) -> None:
        """For what is to be received or sent."""
        self._line.settimeout(seconds)

    def send_no_longer_than(self, seconds: int) -> None:
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def hang_up(self) -> None:
        """Whoever reads from it reads its end."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._line.close()

    def _tag(self, direction: int, size: bytes | bytearray, content: bytes | memoryview) -> bytes:
        number = self._numbers[direction].to_bytes(8, "little")
        self._numbers[direction] += 1
        made = hmac.new(self._keys[direction], number + size, "sha256")
        if self.covers_content:
            made.update(content)
        return made.digest()

    def _fill(self, size: int) -> bool:
        while len(self._buffer) < size:
            part = self._line.recv(max(1 << 16, size - len(self._buffer)))
            if not part:
                return False
            self._buffer += part
        return True


def greet(
    line: socket.socket, secret: bytes, purpose: str, longest: int = LONGEST, seconds: float = GREETING
) -> Channel:
    """The client's part. `purpose` is what both ends want of each other; nothing said for another one counts."""
    _keep_asking(line)
    until, own = time.monotonic() + seconds, secrets.token_bytes(NONCE)
    line.sendall(MAGIC + own)
    theirs = _read(line, NONCE, until)
    nonces = own + theirs
    if not hmac.compare_digest(_read(line, TAG, until), _derive(secret, b"server proves", purpose, nonces)):
        raise Stranger("it does not know this job's secret")
    line.sendall(_derive(secret, b"client proves", purpose, nonces))
    line.settimeout(None)
    keys = _derive(secret, b"client sends", purpose, nonces), _derive(secret, b"server sends", purpose, nonces)
    return Channel(line, *keys, longest)


def admit(
    line: socket.socket, secret: bytes, purpose: str, longest: int = LONGEST, seconds: float = GREETING
) -> Channel:
    """The server's part."""
    _keep_asking(line)
    until, own = time.monotonic() + seconds, secrets.token_bytes(NONCE)
    if _read(line, len(MAGIC), until) != MAGIC:
        raise Stranger("it does not speak this protocol")
    nonces = _read(line, NONCE, until) + own
    line.sendall(own + _derive(secret, b"server proves", purpose, nonces))
    if not hmac.compare_digest(_read(line, TAG, until), _derive(secret, b"client proves", purpose, nonces)):
        raise Stranger("it does not know this job's secret")
    line.settimeout(None)
    keys = _derive(secret, b"server sends", purpose, nonces), _derive(secret, b"client sends", purpose, nonces)
    return Channel(line, *keys, longest)


def _derive(secret: bytes, label: bytes, purpose: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((MAGIC, label, purpose.encode(), nonces)), "sha256")


def _keep_asking(line: socket.socket) -> None:
    """What systems call these differs, and a pair of sockets in one machine has none of them."""
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    times = {idle: QUIET, getattr(socket, "TCP_KEEPINTVL", None): ASKED, getattr(socket, "TCP_KEEPCNT", None): TIMES}
    with suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in times.items():
            if name is not None:
                line.setsockopt(socket.IPPROTO_TCP, name, value)


def _read(line: socket.socket, size: int, until: float) -> bytes:
    found = b""
    while len(found) < size:
        line.settimeout(max(0.001, until - time.monotonic()))
        part = line.recv(size - len(found))
        if not part:
            raise ConnectionError("it left before it had proved anything")  # one of too many, perhaps
        found += part
    return found


def _origin(address: tuple[str, int]) -> str:
    """Of who connects. Whoever has one address of the new internet has all of its network."""
    try:
        host = ipaddress.ip_address(address[0].partition("%")[0])
    except (ValueError, IndexError):
        return ""
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or ipaddress.ip_network((host, 64), strict=False).network_address
    return str(host)


class Door:
    """Where others connect: whoever proves itself is served, in a thread of its own."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        purpose: str,
        serve: Callable[[Channel], None],
        longest: int = LONGEST,
        most: int = 1 << 16,
    ) -> None:
        """`most`: connections that have proved themselves."""
        self._listener, self._secret, self._purpose, self._longest = listener, secret, purpose, longest
        self._work, self._most = serve, most
        self._pending: dict[socket.socket, str] = {}
        """Oldest first, and where each comes from."""
        self._served = 0
        self._lock = threading.Lock()
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more are let in; those that are stay."""
        self._open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would keep it open
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            try:
                line, address = self._listener.accept()
            except OSError:
                time.sleep(0.01)  # no more files may be open: those of strangers are closed soon
                continue
            with self._lock:
                self._pending[line] = _origin(address)
                if len(self._pending) > PENDING:
                    # A stranger that floods the door turns away itself, and none that has yet to prove itself.
                    most = Counter(self._pending.values()).most_common(1)[0][0]
                    one = next(each for each, origin in self._pending.items() if origin == most)
                    del self._pending[one]
                    with suppress(OSError):  # its thread may have closed it just now
                        one.shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._greet, args=(line,), daemon=True).start()
            except RuntimeError:  # no more threads may be started: it comes again, and the door stays
                with self._lock:
                    self._pending.pop(line, None)
                line.close()

    def _greet(self, line: socket.socket) -> None:
        with line:
            try:
                channel = admit(line, self._secret, self._purpose, self._longest)
            except OSError:
                return  # a stranger, or one that left
            finally:
                with self._lock:
                    self._pending.pop(line, None)
            with self._lock:
                if self._served >= self._most:
                    return
                self._served += 1
            try:
                self._work(channel)
            finally:
                with self._lock:
                    self._served -= 1
