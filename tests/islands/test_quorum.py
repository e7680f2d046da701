"""A divided network never trains on as two halves: over real connections, without any ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from cuboid.errors import RankError
from cuboid.islands.coordinator import Client, Coordinator
from cuboid.islands.membership import Membership
from cuboid.spec.islands import IslandsSpec

SPEC = IslandsSpec(count=3, quorum=2, every=2, grace_seconds=1.0)
STEPS = 4000
SECRET = b"what all islands of one job know"
Round = tuple[int, list[int]]


class Link:
    """To a place, as others reach it: it can be cut."""

    def __init__(self, port: int) -> None:
        self._target, self._ends, self.whole = port, list[socket.socket](), True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.whole:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                to.sendall(content)
        self._end([source, to])

    def cut(self) -> None:
        self.whole = False
        self._end(self._ends)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    @staticmethod
    def _end(ends: list[socket.socket]) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Island:
    """Arrives at round after round, and says that it has what the others sent."""

    def __init__(self, number: int, ports: tuple[int, int], join: dict[str, Any] | None = None) -> None:
        self.rounds: list[Round] = []
        self.ended = ""
        new = {"running": False, "round": 0, "left": [], "taken": 0, "need": SPEC.applied(0, STEPS)}
        join = {"run": "one", "layout": "dp=1", "addresses": [["127.0.0.1", 1]], **new, **(join or {})}
        self.client = Client([("127.0.0.1", port) for port in ports], SECRET, number, join)
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        taken, client = 0, self.client
        try:
            round_ = client.enter(lambda: None).round
            while True:
                time.sleep(0.05)
                taken += SPEC.every
                client.arrive(round_, 100, taken)
                mark = (0, False)
                while not mark[1]:
                    news = client.news(round_, mark, lambda: None)
                    mark = (news.version, news.committed)
                    if news.members:
                        client.have(round_, news.version)
                self.rounds.append((round_, sorted(news.members)))
                client.finish(round_, [], taken)
                round_ += 1
        except RankError as error:
            self.ended = str(error)


@pytest.fixture
def places() -> Iterator[tuple[list[int], list[Link]]]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports: list[int] = [listener.getsockname()[1] for listener in listeners]
    coordinators = [Coordinator(listener, SECRET, Membership(SPEC, STEPS)) for listener in listeners]
    links = [Link(port) for port in ports]
    yield ports, links
    for closes in (*links, *coordinators):
        closes.close()


def wait(happened: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_of_a_divided_network_only_the_half_with_a_quorum_trains_on(places: tuple[list[int], list[Link]]) -> None:
    (first, second), links = places
    alone = Island(0, (first, links[1].port))
    others = [Island(number, (links[0].port, second)) for number in (1, 2)]
    islands = [alone, *others]
    try:
        wait(lambda: all(len(island.rounds) > 3 for island in islands))
        for link in links:
            link.cut()
        time.sleep(0.5)  # what was under way
        done, theirs = len(alone.rounds), len(others[0].rounds)
        wait(lambda: all(len(island.rounds) > theirs + 20 for island in others))
        assert len(alone.rounds) == done, "it is no quorum"
        for link in links:
            link.whole = True
        wait(lambda: alone.ended)
        assert "starts again with their state" in alone.ended
        assert all(len(members) > 1 for island in islands for _, members in island.rounds)
        taken = dict(others[0].rounds)
        assert all(taken.get(round_, members) == members for round_, members in others[1].rounds)
    finally:
        for island in islands:
            island.client.close(for_good=False)


def test_islands_that_resume_from_unlike_checkpoints_are_a_quorum() -> None:
    """One of them enters with the state of the other, a moment after that one has begun."""
    members, reported = Membership(SPEC, STEPS), {"running": False, "left": [], "taken": 0, "need": 0}
    for number, round_ in ((0, 5), (1, 3), (2, 0)):
        members.join(number, "dp=1", [("127.0.0.1", 1)], {**reported, "round": round_}, 0.0)
    for now in (0.1, 0.2):
        members.decide(now)
        assert members.begun and not members.is_without_quorum
    assert all(island.entered for island in members.islands.values())
    for number in (1, 2):
        members.lose(number, 1.0)
    members.decide(1.5)
    assert not members.is_without_quorum, "they may be back in a moment"
    members.decide(1.5 + 2 * SPEC.grace_seconds)
    assert members.is_without_quorum


def test_at_the_end_who_is_left_ends_alone() -> None:
    """The last round was closed with all; one has left when another, whose connection broke, asks for it again."""
    spec, steps = IslandsSpec(count=2, quorum=2, every=2, grace_seconds=1.0), 2
    members, reported = Membership(spec, steps), {"running": False, "left": [], "taken": 0, "need": 2, "round": 0}
    for number in (0, 1):
        members.join(number, "dp=1", [("127.0.0.1", 1)], dict(reported), 0.0)
    members.decide(0.1)
    last = spec.rounds_due(steps, steps).stop
    for round_ in range(last):
        for number in (0, 1):
            members.arrive(number, round_, 100, 2)
        members.decide(1.0 + round_)
    assert members.is_over
    members.have(0, last - 1, members.rounds[last - 1].version)
    members.lose(1, 5.0)
    members.decide(5.0 + 2 * spec.grace_seconds)
    assert members.rounds[last - 1].committed
    members.lose(0, 8.0, for_good=True)
    members.join(1, "dp=1", [("127.0.0.1", 1)], {**reported, "running": True, "round": last - 1}, 8.5)
    members.arrive(1, last - 1, 100, 0)
    for now in (9.0, 9.5, 12.0):
        members.decide(now)
        assert not members.is_without_quorum
    assert members.rounds[last - 1].closed and set(members.rounds[last - 1].members) == {1}


def test_at_one_place_too_few_wait_for_the_others(places: tuple[list[int], list[Link]]) -> None:
    (first, _), links = places
    stays = Island(0, (first, first))
    others = [Island(number, (links[0].port, links[0].port)) for number in (1, 2)]
    try:
        wait(lambda: all(len(island.rounds) > 3 for island in (stays, *others)))
        links[0].cut()
        time.sleep(2 * SPEC.grace_seconds)  # the place has given the others up
        done = len(stays.rounds)
        time.sleep(0.5)
        assert len(stays.rounds) == done
        links[0].whole = True
        wait(lambda: len(stays.rounds) > done + 5)
        assert stays.rounds[-1][1] == [0, 1, 2]
        assert not any(island.ended for island in (stays, *others))
    finally:
        for island in (stays, *others):
            island.client.close(for_good=False)


def test_a_word_that_makes_no_sense_keeps_nobody_from_deciding(places: tuple[list[int], list[Link]]) -> None:
    (first, _), _ = places
    odd = Island(2, (first, first), {"round": "?", "left": 7})
    islands = [Island(number, (first, first)) for number in (0, 1)]
    try:
        wait(lambda: all(len(island.rounds) > 3 for island in islands))
        assert not odd.rounds
    finally:
        for island in (odd, *islands):
            island.client.close(for_good=False)
