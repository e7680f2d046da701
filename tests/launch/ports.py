"""A port that nobody takes between the moment it is found free and the moment a test listens on it."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Not one of those the system gives to whoever asks for any, as the ranks of tests beside this one do all the
    time; and each process of tests looks in an order of its own."""
    lowest = int(RANGE.read_text().split()[0])
    looked_at = random.Random(os.urandom(8)).sample(range(10_000, lowest), 200)
    for port in looked_at:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"none of {len(looked_at)} ports is free")
