"""What two ranks do in tests of the connections between them."""

from __future__ import annotations

import socket
import struct
import threading

import torch

from cuboid.checkpoint.memory.pairs import PURPOSE, Pairs
from cuboid.parallel.coordination import open_coordination
from cuboid.secure_channel import greet


def copy(rank: int, secrets: list[bytes]) -> str:
    """Twice, with a failure in between; what the other sent, or why nothing came. A stranger tries while the other
    waits, and after: then nobody listens."""
    pairs = Pairs(open_coordination(5), secrets[rank])
    try:
        for attempt in range(2):
            if rank and not attempt:
                assert _try(pairs) == "Stranger"
            pairs.connect([1 - rank, 1 - rank])
            while rank and (told := _try(pairs)) != "ConnectionRefusedError":  # the other closes its door just now
                assert told != "as a friend"
            own, other = torch.full((300_000,), rank + 1, dtype=torch.uint8), torch.zeros(300_000, dtype=torch.uint8)
            works = [pairs.receive(other, 1 - rank), pairs.send(own, 1 - rank)]
            for work in works:
                work.wait()
            assert (other == 2 - rank).all()
            if attempt == 0:
                pairs.break_off()
    except OSError as error:
        return type(error).__name__
    return "copied"


def die_and_come_again(rank: int) -> list[str]:
    """Rank 1 greets rank 0 twice, resets one connection and says nonsense in the other, and then comes as it should.
    What threads of this rank failed with."""
    failed: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda told: failed.append(told.exc_type.__name__)
    try:
        pairs = Pairs(open_coordination(20), b"the secret of a job, known to both")
        if rank:
            pairs._group.store.wait([f"{pairs._place}/0"])
            address, port = pairs._group.store.get(f"{pairs._place}/0").decode().split()
            for nonsense in (b"", b"one two three"):
                with socket.create_connection((address, int(port))) as line:
                    channel = greet(line, pairs._key, f"{PURPOSE} 0")
                    if nonsense:
                        channel.send(nonsense)
                    else:
                        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pairs.connect([1 - rank])
        pairs.break_off()
        pairs._group.agree("")
    finally:
        threading.excepthook = before
    return failed


def _try(pairs: Pairs) -> str:
    """How a stranger is received."""
    address, port = pairs._group.store.get(f"{pairs._place}/0").decode().split()
    try:
        with socket.create_connection((address, int(port))) as line:
            greet(line, b"a guess", PURPOSE)
    except OSError as error:
        return type(error).__name__
    return "as a friend"
