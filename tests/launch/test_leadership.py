"""Who leads a job on many nodes: over real connections and a real folder, without any ranks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cuboid.checkpoint.terms import Term, Terms
from cuboid.launch.coordinator import Order, Status
from cuboid.launch.coordinator_rpc import CoordinatorClient
from cuboid.launch.leadership import Leadership, leader_answers, secret_of
from cuboid.launch.network import Endpoint, Interface, listen
from cuboid.launch.start import Nodes
from cuboid.spec.run import Run, build_run
from cuboid.training.claim import try_claim
from tests.launch.ports import free_port


class Node:
    """A supervisor's part in it, with a lock of its own on the run's folder."""

    def __init__(self, run: Run, nodes: Nodes, name: str) -> None:
        self.run, self.nodes, self.name = run, nodes, name
        self.leadership = Leadership(run, nodes, name, quiet=True)
        self.lock: int | None = None
        self.contact: CoordinatorClient | None = None

    def lead(self) -> bool:
        self.lock = try_claim(Path(self.run.output.folder))
        return self.leadership.lead(listen(self.nodes.endpoint.host, self.nodes.endpoint.port))

    def follow(self) -> CoordinatorClient:
        self.contact = CoordinatorClient(
            self.leadership.where,
            lambda: secret_of(self.run),
            self.name,
            self.nodes.fingerprint(self.run),
            lost_after=self.run.resilience.contact_seconds,
        )
        self.leadership.stand_by(self.contact)
        return self.contact

    def close(self) -> None:
        if self.contact is not None:
            self.contact.close()
        self.leadership.end(0, "the test is over")
        if self.lock is not None:
            os.close(self.lock)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    folder = tmp_path / "run"
    folder.mkdir()
    settings = ["training.global_batch=8", f"output.folder={folder}", "resilience.contact_seconds=5"]
    run = build_run({"model": "tiny-llama", "layout": "dp=2"}, [*settings, "checkpoint.every=1"])
    nodes = Nodes(Endpoint("127.0.0.1", free_port()), Interface("lo", "127.0.0.1"), 1, 2, 1)
    made: list[Node] = []

    def start(name: str) -> Node:
        made.append(Node(run, nodes, name))
        return made[-1]

    yield start
    for node in reversed(made):
        node.close()


def wait(happened: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_who_leads_is_found_by_the_folder_and_answers_who_knows_the_secret(
    start: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start("a"), start("b")
    assert not leader_answers(first.run), "nobody leads yet"
    assert second.leadership.where() == [first.nodes.endpoint], "the rendezvous is all that is known"
    assert first.lead() and first.leadership.leads and not second.leadership.leads
    assert leader_answers(second.run)
    terms = Terms(Path(first.run.output.folder))
    wait(lambda: (terms.newest() or Term(0)).beat > 1)
    monkeypatch.setenv("CUBOID_SECRET", "0" * 64)
    assert not leader_answers(second.run), "one who has another secret is not answered"


def test_of_two_who_take_the_same_term_one_leads(start: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start("a"), start("b")
    looked = Terms.newest
    # Both look before either takes the term: what the second sees is the folder of before.
    assert first.lead()
    monkeypatch.setattr(Terms, "newest", lambda terms: None)
    assert not second.leadership.lead(listen("127.0.0.1", 0)) and not second.leadership.leads
    monkeypatch.setattr(Terms, "newest", looked)
    assert (Terms(Path(first.run.output.folder)).newest() or Term(0)).leader == "a"


def test_who_led_follows_a_newer_term(start: Callable[[str], Node], capsys: pytest.CaptureFixture[str]) -> None:
    first = start("a")
    assert first.lead()
    assert Terms(Path(first.run.output.folder)).take(Term(2, "b", "127.0.0.1", 1))
    wait(lambda: not first.leadership.leads)
    assert "another node leads now: this node leads no more, and ends its ranks" in capsys.readouterr().err
    assert first.leadership.where()[0] == Endpoint("127.0.0.1", 1), "who took the newest term is asked first"


def test_who_cannot_reach_the_folder_leads_no_more(
    start: Callable[[str], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start("a")
    assert first.lead()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    wait(lambda: not first.leadership.leads)
    assert "this node leads no more" in capsys.readouterr().err
    shutil.move(tmp_path / "elsewhere", tmp_path / "run")


def test_who_gets_no_answer_from_the_folder_leads_no_more(
    start: Callable[[str], Node], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a network file system whose server is gone: a call does not return, and raises nothing."""
    first = start("a")
    answers, asked = threading.Event(), Terms.newest
    assert first.lead()
    led = first.leadership

    def newest(terms: Terms) -> Term | None:
        answers.wait()
        return asked(terms)

    monkeypatch.setattr(Terms, "newest", newest)
    wait(lambda: not led.leads)
    answers.set()
    assert "the run's folder does not answer: this node leads no more" in capsys.readouterr().err


def test_words_that_nobody_takes_and_a_folder_that_fails_keep_nobody_from_deciding(
    start: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("cuboid.launch.leadership._tell", fails)
    monkeypatch.setattr("cuboid.launch.leadership.say", fails)
    monkeypatch.setattr("cuboid.launch.leadership.forget_reports", fails)
    first, second = start("a"), start("b")
    contacts = train_together(first, second)
    order = contacts[1].order
    assert order is not None
    contacts[1].tell(Status(order.number, "failed", "a rank died"))
    for contact in contacts:
        again = contact.next(order.number, 60.0, lambda: False)
        assert again is not None and again.task == "wait"
        contact.tell(Status(again.number, "ready"))
    wait(lambda: all(contact.order is not None and contact.order.number > again.number for contact in contacts))


def test_a_node_takes_over_although_the_folder_fails_for_a_moment(
    start: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start("a"), start("b")
    train_together(first, second)
    real, failures = try_claim, []

    def fails_once(folder: Path) -> int | None:
        if not failures:
            failures.append(folder)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(folder)

    time.sleep(2)  # the second has seen that the first holds the lock
    monkeypatch.setattr("cuboid.launch.leadership.try_claim", fails_once)
    first.leadership.abandon()
    first.close()
    first.lock = None
    wait(lambda: second.leadership.leads)
    assert failures


def test_a_lock_that_the_leader_does_not_hold_says_nothing(start: Callable[[str], Node]) -> None:
    """It was held by who led before, stood still, and has ended by now."""
    first, second = start("a"), start("b")
    frozen = try_claim(Path(first.run.output.folder))
    assert frozen is not None
    train_together(first, second, locked=False)
    terms = Terms(Path(first.run.output.folder))
    assert not (terms.newest() or Term(0)).locked
    time.sleep(2)
    os.close(frozen)
    wait(lambda: (terms.newest() or Term(0)).locked)
    with pytest.raises(BlockingIOError):
        try_claim(Path(first.run.output.folder))


def train_together(first: Node, second: Node, locked: bool = True) -> list[CoordinatorClient]:
    """`locked`: whether the first has claimed the folder before it leads."""
    if locked:
        assert first.lead()
    else:
        after = Order(1, "wait")
        where = first.nodes.endpoint
        assert first.leadership.lead(listen(where.host, where.port), after)
    first.leadership.serve_store()
    contacts = [first.follow(), second.follow()]
    waits = [contact.next(None, 60.0, lambda: False) for contact in contacts]
    for contact, order in zip(contacts, waits, strict=True):
        assert order is not None
        contact.tell(Status(order.number, "ready"))
    wait(lambda: all(contact.order is not None and contact.order.task == "train" for contact in contacts))
    return contacts


def test_a_folder_that_is_locked_and_alive_is_not_taken_over(start: Callable[[str], Node]) -> None:
    first, second = start("a"), start("b")
    train_together(first, second)
    time.sleep(3)  # more beats than a node that hears nothing waits for
    assert first.leadership.leads and not second.leadership.leads
    assert (Terms(Path(first.run.output.folder)).newest() or Term(0)).number == 1


def test_who_leads_next_repeats_no_order_whatever_its_clock_says(
    start: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)  # two nodes whose clocks differ by what lies between
    first, second = start("a"), start("b")
    assert first.lead()
    contact = first.follow()
    before = contact.next(None, 60.0, lambda: False)
    assert second.leadership.lead(listen("127.0.0.1", 0))
    wait(lambda: contact.order is not None and contact.order.term == 2)
    assert before is not None and contact.order is not None and contact.order.number > before.number
