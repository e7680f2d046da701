"""A real store of PyTorch behind a gate: ranks of another node use it as their own, strangers do not reach it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cuboid.errors import RankError, UserError
from cuboid.launch.network import Endpoint
from cuboid.launch.rendezvous import reach_store, serve_store
from cuboid.launch.store_tunnel import PURPOSE, MeetingStore, StoreGate, StoreTunnel
from cuboid.secure_channel import Stranger, admit

SECRET = b"what the supervisors of one job know"


class Served:
    def __init__(self) -> None:
        listener, meeting = (socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(2))
        self.port, self.where = listener.getsockname()[1], meeting.getsockname()
        self.store = serve_store(listener)
        self.gate = StoreGate(meeting, SECRET, self.port)

    def tunnel(self) -> StoreTunnel:
        return StoreTunnel(*self.where, SECRET)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.gate.close()


def reach(port: int) -> Any:
    return reach_store("127.0.0.1", port, "test", timedelta(seconds=20))


def test_ranks_of_two_nodes_meet_in_one_store(served: Served) -> None:
    tunnels = [served.tunnel(), served.tunnel()]
    here, there = reach(served.port), [reach(tunnel.port) for tunnel in tunnels for _ in range(4)]
    here.set("large", bytes(3 << 20))
    assert all(store.get("large") == bytes(3 << 20) for store in there)
    found: list[bytes] = []
    copies = [store.clone() for store in there]  # a connection waits for one answer at a time
    waiting = [threading.Thread(target=lambda store=store: found.append(store.get("later"))) for store in copies]
    for thread in waiting:
        thread.start()
    assert [store.add("count", 1) for store in there] == list(range(1, 9)) and not found
    there[0].clone().set("later", b"yes")
    for thread in waiting:
        thread.join(300)
    assert found == [b"yes"] * 8
    for tunnel in tunnels:
        tunnel.close()


def test_a_store_through_the_tunnel_answers_soon(served: Served) -> None:
    tunnel = served.tunnel()
    store = reach(tunnel.port)
    seconds = []
    for number in range(200):
        began = time.monotonic()
        store.set(str(number), b"x")
        store.get(str(number))
        seconds.append(time.monotonic() - began)
    # Two messages that wait for an acknowledgement take 40 ms each, every time; other programs, now and then.
    assert sorted(seconds)[len(seconds) // 4] < 0.05
    tunnel.close()


def test_ranks_learn_at_once_that_the_leading_node_is_gone(served: Served) -> None:
    tunnel = served.tunnel()
    store = reach(tunnel.port)
    store.set("a", b"b")
    began = time.monotonic()
    threading.Timer(0.2, served.gate.close).start()
    with pytest.raises(RuntimeError):
        store.get("never")
    assert time.monotonic() - began < 60
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", tunnel.port), timeout=2) as line:
        while line.recv(1024):
            pass
        raise ConnectionError


def test_a_rank_that_comes_as_the_tunnel_ends_is_told_so(served: Served) -> None:
    """Its connection was accepted before, and joins the others after the last of them has ended."""
    tunnel = served.tunnel()
    tunnel.close()
    limit = time.monotonic() + 60
    while tunnel._bundle._woken.fileno() >= 0:
        assert time.monotonic() < limit
        time.sleep(0.01)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=60) as rank,
    ):
        tunnel._bundle.add(1, listener.accept()[0])
        assert rank.recv(1) == b""


def test_strangers_do_not_reach_the_store(served: Served) -> None:
    with pytest.raises(Stranger):
        StoreTunnel(*served.where, b"another secret of a stranger")
    with pytest.raises(RuntimeError):
        TCPStore(*served.where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    for junk in (b"junk" * 100, bytes(1000), b""):
        with suppress(OSError), socket.create_connection(served.where) as line:
            line.sendall(junk)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1024):
                pass
    tunnel = served.tunnel()
    assert reach(tunnel.port).add("count", 1) == 1
    tunnel.close()


def test_a_node_that_was_pushed_out_at_the_door_comes_again() -> None:
    """As in a flood of strangers: who hangs up has not said that the secret is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def hang_up_once() -> None:
            door.accept()[0].close()
            line, _ = door.accept()
            with line:
                admit(line, SECRET, PURPOSE)

        thread = threading.Thread(target=hang_up_once)
        thread.start()
        MeetingStore(None, Endpoint(*door.getsockname()[:2]), SECRET, patience=10).close()
        thread.join(10)
        assert not thread.is_alive()


def test_nodes_that_meet_once_need_a_secret_off_loopback() -> None:
    with pytest.raises(
        UserError, match=r"^rendezvous=10.0.0.1:29400 is open to others, and this node knows no job secr"
    ):
        MeetingStore(None, Endpoint("10.0.0.1", 29400), None, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = Endpoint(*listener.getsockname()[:2])
        serving = MeetingStore(listener, where, SECRET, 1.0)
        meeting = MeetingStore(None, where, SECRET, 1.0)
        assert (meeting.host, serving.host) == ("127.0.0.1", "127.0.0.1") and meeting.port != where.port
        serving.served.set("test/a", b"b")
        assert reach(meeting.port).get("a") == b"b"
        with pytest.raises(UserError, match="has another job secret; set the same CUBOID_SECRET on every node"):
            MeetingStore(None, where, b"guessed by a stranger", 1.0)
        meeting.close()
        serving.close()
    with pytest.raises(RankError, match="did not answer in time; start that node too"):
        MeetingStore(None, where, SECRET, 0.5)
