"""The store where ranks meet: on one address, apart by attempt, and gone with who serves it."""

from __future__ import annotations

import resource
import socket
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, DistStoreError  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from cuboid.launch.capacity import allow_many_files
from cuboid.launch.rendezvous import BACKEND, reach_store, serve_store

SOON = timedelta(seconds=2)


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_what_one_attempt_said_is_not_heard_by_the_next() -> None:
    listens = listener()
    port = listens.getsockname()[1]
    store = serve_store(listens)
    first, again = (reach_store("127.0.0.1", port, name, SOON) for name in ("attempt-1", "attempt-2"))
    first.set("layout", "dp=2")
    assert reach_store("127.0.0.1", port, "attempt-1", SOON).get("layout") == b"dp=2"
    assert not again.check(["layout"])
    assert first.add("ranks", 1) == 1 and again.add("ranks", 1) == 1
    del store


def test_nobody_reaches_it_on_another_address() -> None:
    """Left to itself a TCPStore listens on every interface of the machine."""
    listens = listener()
    port = listens.getsockname()[1]
    store = serve_store(listens)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    del store


def test_it_ends_with_the_last_reference() -> None:
    listens = listener()
    port = listens.getsockname()[1]
    store = serve_store(listens)
    del store
    with pytest.raises((DistNetworkError, DistStoreError)):
        reach_store("127.0.0.1", port, "attempt-1", timedelta(seconds=0.3))


def test_as_many_connections_as_the_system_allows() -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(limit, 512)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_the_elastic_agent_has_this_machine_to_itself() -> None:
    """It is the coordinator that knows of other machines: the agent must neither wait for them nor restart for them."""
    handler = rendezvous_handler_registry.create_handler(RendezvousParameters(BACKEND, "", "job", 1, 1))
    one, other = handler.next_rendezvous(), handler.next_rendezvous()
    assert (one.rank, one.world_size, handler.get_run_id()) == (0, 1, "job")
    assert handler.num_nodes_waiting() == 0 and not handler.is_closed()
    one.store.set("ranks", "of the first attempt")
    assert not other.store.check(["ranks"])
