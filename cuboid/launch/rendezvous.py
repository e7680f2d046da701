"""How the ranks of one attempt find each other: a store that one supervisor serves, on the address it was given.

PyTorch's elastic agent runs the ranks of its own machine; which machines take part is settled before it starts."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from cuboid.launch.capacity import allow_many_files

BACKEND = "cuboid"
PATIENCE = timedelta(minutes=30)
"""How long a rank waits there for what others have to say, as PyTorch's groups do."""


def serve_store(listener: socket.socket) -> Any:
    """A store behind a socket that listens already: left to itself it would listen on every interface. It is gone when
    nobody refers to it any more."""
    allow_many_files()
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(address: str, port: int, attempt: str, patience: timedelta = PATIENCE) -> Any:
    """As a rank sees it; `attempt` keeps apart what earlier attempts have said there."""
    served = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
    return PrefixStore(attempt, served)


class OwnRanks(RendezvousHandler):
    """Of this machine alone, so the agent never waits for another: machines come and go by the coordinator."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


def _make(parameters: RendezvousParameters) -> Any:
    return OwnRanks(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _make)
