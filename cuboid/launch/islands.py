"""Islands: the place where they meet, and all of them on this machine for a proof."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cuboid.islands.coordinator import Coordinator
from cuboid.islands.membership import Membership
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run


@contextmanager
def coordinated(run: Run, listener: socket.socket, secret: bytes, first: int = 0) -> Iterator[Coordinator]:
    """Meanwhile this process decides for all islands. `first`: how many begin together."""
    coordinator = Coordinator(listener, secret, Membership(run.islands, run.training.steps, first))
    try:
        yield coordinator
    finally:
        coordinator.close()


def prove(runs: Sequence[Run], pool: Pool) -> dict[str, Any]:
    """All islands on this machine, over loopback, against a simulation in one process."""
    secret = secrets.token_bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with coordinated(runs[0], listener, secret, len(runs)):
            jobs = [((run, number, port, secret), run.layout.world_size) for number, run in enumerate(runs)]
            found = pool.run_apart("cuboid.verification.islands:train_island", jobs)
        observed = [ranks[0] for ranks in found]
        verdict: dict[str, Any] = pool.run("cuboid.verification.islands:judge", (list(runs), observed), ranks=1)[0]
    return verdict
