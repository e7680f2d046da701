"""The coordinator over real connections, without any ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict

import pytest

from cuboid.launch.coordinator import Coordinator, Order, Rules, Status
from cuboid.launch.coordinator_rpc import OTHER_RUN, CoordinatorClient, CoordinatorServer, _encode
from cuboid.launch.network import Endpoint
from cuboid.resilience.replan import Choice
from cuboid.secure_channel import greet

SECRET = b"what the supervisors of one job know"


def arrange(there: tuple[str, ...]) -> tuple[Choice, tuple[str, ...]]:
    return Choice(len(there), 1, f"dp={len(there)}", f"{len(there)} nodes"), there


class Office:
    def __init__(self) -> None:
        self.said: list[Order] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(*listener.getsockname()[:2])
        rules = Rules(2, 2, lost_after=60.0, gather=60.0, patience=600.0)
        coordinator = Coordinator("a", rules, arrange, lambda *_: "", lambda: 0, number=1)
        self.desk = CoordinatorServer(listener, SECRET, coordinator, "the run", self.said.append)
        self.desk.meet_at("127.0.0.1", 1)
        self.contacts: list[CoordinatorClient] = []

    def join(self, node: str, run: str = "the run") -> CoordinatorClient:
        self.contacts.append(CoordinatorClient(lambda: [self.endpoint], lambda: SECRET, node, run, lost_after=60.0))
        return self.contacts[-1]


@pytest.fixture
def office() -> Iterator[Office]:
    made = Office()
    yield made
    for contact in made.contacts:
        contact.close()
    made.desk.end(0, "the test is over", patience=30.0)


def wait(happened: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.01)


def never() -> bool:
    return False


def test_orders_reach_everybody_and_answers_the_leader(office: Office) -> None:
    contacts = [office.join("a"), office.join("b")]
    for contact in contacts:
        order = contact.next(None, 60.0, never)
        assert order is not None and order.task == "wait"
        contact.tell(Status(order.number, "ready"))
    orders = [contact.next(1, 60.0, never) for contact in contacts]
    assert orders[0] == orders[1] and orders[0] is not None
    assert (orders[0].task, orders[0].members, orders[0].layout) == ("train", ("a", "b"), "dp=2")
    for contact in contacts:
        contact.tell(Status(orders[0].number, "done"))
    assert [contact.next(orders[0].number, 60.0, never) for contact in contacts] == [office.said[-1]] * 2
    assert (office.said[-1].task, office.said[-1].status) == ("end", 0)


def test_a_contact_finds_its_way_back(office: Office) -> None:
    contact = office.join("b")
    wait(lambda: contact.order)
    for line in list(office.desk._lines.values()):
        line.hang_up()
    heard = contact._heard
    wait(lambda: contact._heard > heard + 0.5)
    assert not contact.lost and contact.silence < 60


def test_who_led_answers_nobody_who_connected_in_that_moment() -> None:
    """A node that woke up connected to itself, found that another led, and heard itself for ever."""
    office = Office()
    with socket.create_connection((office.endpoint.host, office.endpoint.port)) as line:
        channel = greet(line, SECRET, "coordinator")  # it is let in, and has said nothing yet
        office.desk.stop_leading()
        channel.wait_no_longer_than(30)
        channel.send(_encode({"node": "a", "run": "the run", "status": asdict(Status())}))
        assert channel.receive() is None


def test_another_run_and_strangers_are_sent_away(office: Office) -> None:
    other = office.join("b", run="another run")
    assert other.next(None, 60.0, never) is None
    assert other.refused == OTHER_RUN
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n" * 20, b"x" * (1 << 20)):
        with (
            suppress(ConnectionError),
            socket.create_connection((office.endpoint.host, office.endpoint.port)) as line,
        ):
            line.sendall(nonsense)
            while line.recv(1024):  # until it hangs up
                pass
    for message in (b"{}", b"[1]", b"null", b"\xff"):  # from one who knows the secret, and is broken
        with socket.create_connection((office.endpoint.host, office.endpoint.port)) as line:
            channel = greet(line, SECRET, "coordinator")
            channel.send(message)
            assert channel.receive() is None
    wait(lambda: office.join("c").next(None, 60.0, never))


def test_a_node_that_has_another_secret_says_so(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuboid.launch.coordinator_rpc.UNTRUSTED", 0.5)
    for secret, why in ((b"guessed" * 8, "has another job secret than this node"), (None, "and this node none")):
        contact = CoordinatorClient(
            lambda: [office.endpoint], lambda secret=secret: secret, "b", "the run", lost_after=60.0
        )  # type: ignore[misc]
        assert contact.next(None, 60.0, never) is None
        assert why in contact.refused and "give all nodes the same CUBOID_SECRET" in contact.refused
        contact.close()
    assert office.desk._coordinator.nodes == ["a"], "nobody else was let in"


def test_silence_and_a_wish_to_stop_end_the_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nowhere = Endpoint(*nobody.getsockname()[:2])
        contact = CoordinatorClient(lambda: [nowhere], lambda: SECRET, "a", "the run", lost_after=0.2)
        assert contact.next(None, 0.5, never) is None and contact.lost
        wait(lambda: contact._noted)
        assert capsys.readouterr().err.startswith("warning: nothing is heard from the leading node at 127.0.0.1:")
        assert contact.next(None, 60.0, lambda: True) is None
        contact.close()


def test_a_folder_that_fails_for_a_moment_is_told_of_and_one_that_fails_for_long_ends_the_job(
    office: Office, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(now: float) -> Order:
        raise OSError(5, "Input/output error")

    contact = office.join("a")
    wait(lambda: contact.order is not None)
    coordinator = office.desk._coordinator
    with monkeypatch.context() as patched:
        patched.setattr(coordinator, "decide", fails)
        wait(lambda: office.desk._fails_since is not None)
    wait(lambda: office.desk._fails_since is None)
    assert capsys.readouterr().err.count("nothing is decided until this works again") == 1
    monkeypatch.setattr("cuboid.launch.coordinator_rpc.FAILING", 0.0)
    monkeypatch.setattr(coordinator, "decide", fails)
    wait(lambda: contact.order is not None and contact.order.task == "end")
    assert contact.order is not None and "nothing could be decided: [Errno 5]" in contact.order.reason
