"""Islands that are lost, come back, stop and resume; places and connections that break."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.errors import UserError
from cuboid.islands.coordinator import Client
from cuboid.islands.links import SENT, Counts, Gone, Held, Link, LinkServer, Outbox
from cuboid.islands.sync import Site
from cuboid.launch.islands import coordinated, prove_at
from cuboid.launch.pool import Pool
from cuboid.secure_channel import Stranger
from cuboid.spec.run import Run, build_run
from cuboid.verification.make import islands_runs

SECRET = secrets.token_bytes(32)


def island_run(folder: Path, number: int, layout: str, count: int, *settings: str) -> Run:
    table = {
        "model": "tiny-llama",
        "layout": layout,
        "data": {"source": "synthetic"},
        "training": {"steps": 8, "global_batch": 2, "sequence": 8, "precision": "float64", "device": "cpu"},
        "islands": {"count": count, "every": 2, "fragments": 2, "delay": 1, "bits": 8},
        "output": {"folder": str(folder / str(number))},
    }
    return build_run(table, ["model.layers=1", *settings])


def train(pool: Pool, runs: Sequence[Run], *how: dict[str, Any]) -> list[dict[str, Any]]:
    listener = socket.create_server(("127.0.0.1", 0))
    places = (("127.0.0.1", listener.getsockname()[1]),)
    with coordinated(runs[0], listener, SECRET, len(runs)):
        jobs = []
        for number, run in enumerate(runs):
            own = how[number] if how else {}
            arguments = (run, Site(number, places, "127.0.0.1", SECRET), *(own.get(each, 0) for each in KINDS))
            jobs.append((arguments, run.layout.world_size))
        return [ranks[0] for ranks in pool.run_apart("tests.islands.jobs:trained", jobs)]


KINDS = ("pace", "last", "back", "tells", "waits_for", "together")


def test_islands_resume_on_other_layouts_and_in_another_number(pool: Pool, tmp_path: Path) -> None:
    keeps = ("checkpoint.every=4", "checkpoint.asynchronous=false")
    whole = train(pool, [island_run(tmp_path / "whole", each, "dp=1", 2) for each in range(2)])
    assert [each["batches"] for each in whole] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    stops: tuple[dict[str, float], ...] = ({"last": 4},) * 3
    folder = tmp_path / "alike"
    first = train(pool, [island_run(folder, each, "dp=1", 2, *keeps) for each in range(2)], *stops[:2])
    then = train(pool, [island_run(folder, 0, "tp=2", 2, *keeps), island_run(folder, 1, "dp=2,zero=3", 2, *keeps)])
    for number in range(2):
        assert first[number]["batches"] + then[number]["batches"] == whole[number]["batches"]
        assert then[number]["loss"] == pytest.approx(whole[number]["loss"], rel=1e-9)
    for before, after in ((3, 2), (2, 3)):
        folder = tmp_path / f"{before}-{after}"
        first = train(
            pool, [island_run(folder, each, "dp=1", before, *keeps) for each in range(before)], *stops[:before]
        )
        then = train(pool, [island_run(folder, each, "dp=1", after, *keeps) for each in range(after)])
        taken = sorted(batch for each in (*first, *then) for batch in each["batches"])
        assert taken == list(range(len(taken))), (before, after, taken)
        assert all(torch.equal(then[0]["weights"][name], x) for each in then for name, x in each["weights"].items())


def test_islands_of_unequal_batches_resume_with_other_weights(pool: Pool, tmp_path: Path) -> None:
    keeps = ("checkpoint.every=4", "checkpoint.asynchronous=false")
    taken = []
    for weights, stops in (((3, 1), ({"last": 4},) * 2), ((1, 3), ())):
        table = (*keeps, f"islands.batch_weights={weights[0]}:{weights[1]}")
        own = [(*table, f"training.global_batch={2 * weight}") for weight in weights]
        found = train(pool, [island_run(tmp_path, each, "dp=1", 2, *own[each]) for each in range(2)], *stops)
        taken.append([each["batches"] for each in found])
    assert taken[0] == [[0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14], [3, 7, 11, 15]]
    assert len(taken[1][0]) == 4
    assert sorted(batch for own in (*taken[0], *taken[1]) for batch in own) == list(range(32))


def test_two_of_three_islands_resume_on_other_layouts(pool: Pool, tmp_path: Path) -> None:
    """From step 4, with rounds after 3, 6, …: what the third one has trained on since its last round goes with it."""
    settings = (
        "checkpoint.every=4",
        "checkpoint.asynchronous=false",
        "islands.every=3",
        "islands.fragments=1",
        "training.steps=14",
    )
    layouts = ("dp=1", "tp=2", "dp=2,zero=3")
    runs = [island_run(tmp_path, each, layout, 3, *settings) for each, layout in enumerate(layouts)]
    first = train(pool, runs, *({"last": 4},) * 3)
    assert [len(each["batches"]) for each in first] == [4, 4, 4]
    layouts = ("dp=2,tp=2", "dp=1")
    then = train(pool, [island_run(tmp_path, each, layout, 2, *settings) for each, layout in enumerate(layouts)])
    counts = [*first[0]["batches"], *first[1]["batches"], *first[2]["batches"][:3], *then[0]["batches"]]
    counts += then[1]["batches"]
    assert sorted(counts) == list(range(31)), "each batch of the first 31 once: 11 before, 20 after"


def test_an_island_is_lost_and_comes_back_as_a_new_one(pool: Pool, tmp_path: Path) -> None:
    quick = ("training.steps=24", "islands.grace_seconds=1.0")
    runs = [island_run(tmp_path, each, "dp=1", 3, *quick) for each in range(3)]
    found = train(pool, runs, {"pace": 0.2}, {"pace": 0.2}, {"pace": 0.2, "last": 3, "back": 0.1})
    assert all(torch.equal(found[0]["weights"][name], x) for each in found for name, x in each["weights"].items())
    assert all(torch.equal(*pair) for each in found for pair in zip(each["outer"], found[0]["outer"], strict=True))
    assert [len(each["batches"]) for each in found[:2]] == [24, 24] and 0 < len(found[2]["batches"]) < 22
    taken = sorted(batch for each in found for batch in each["batches"])
    assert len(taken) == len(set(taken)) and set(range(max(taken) + 1)) - set(taken) <= set(found[2]["lost"])


def late_runs(folder: Path, count: int) -> list[Run]:
    """Rounds are due after steps 2, 4, …"""
    settings = ("training.steps=10", "islands.every=4", "islands.grace_seconds=1.5")
    return [island_run(folder, each, "dp=1", count, *settings) for each in range(count)]


def test_a_late_island_catches_up(pool: Pool, tmp_path: Path) -> None:
    """The other one has two rounds by itself."""
    runs = late_runs(tmp_path, 2)
    how = {"waits_for": (3, runs[1]), "tells": 5}, {"tells": 7, "waits_for": (7, runs[0])}
    late, other = train(pool, runs, *({**each, "together": 2} for each in how))
    assert late["steps"] == [0, 1, 2, 3, 4, 6, 7, 8, 9] and other["steps"] == list(range(10))
    assert_alike(late, other)


def test_a_late_island_takes_the_state_of_another_when_what_it_needs_is_gone(pool: Pool, tmp_path: Path) -> None:
    runs = late_runs(tmp_path, 3)
    how = {"waits_for": (3, runs[1]), "tells": 5}, {"last": 5}, {"waits_for": (7, runs[0])}
    late, _, other = train(pool, runs, *({**each, "together": 3} for each in how))
    assert_alike(late, other)


def test_a_late_island_goes_on_alone_when_nobody_has_what_it_needs(pool: Pool, tmp_path: Path) -> None:
    runs = late_runs(tmp_path, 2)
    late, _ = train(pool, runs, {"waits_for": (3, runs[1]), "together": 2}, {"last": 5, "together": 2})
    assert late["steps"] == list(range(10)) and len(set(late["batches"])) == 10


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert all(torch.equal(x, other["weights"][name]) for name, x in one["weights"].items())
    assert all(torch.equal(*pair) for pair in zip(one["outer"], other["outer"], strict=True))
    assert not set(one["batches"]) & set(other["batches"])


def test_another_place_decides_when_the_first_is_lost(pool: Pool) -> None:
    settings = ("training.global_batch=4", "training.sequence=8", "model.layers=2", "islands.bits=8")
    runs = islands_runs("dp=2; tp=2", "tiny-llama", settings, 24, "float64", 0)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    places = tuple(("127.0.0.1", each.getsockname()[1]) for each in listeners)
    with coordinated(runs[0], listeners[0], SECRET) as first, coordinated(runs[0], listeners[1], SECRET):

        def end() -> None:
            while not first.rounds_closed >= 3:
                time.sleep(0.01)
            first.close()

        threading.Thread(target=end, daemon=True).start()
        verdict = prove_at(runs, pool, places, SECRET)
    assert verdict["passed"], verdict


def joins(number: int, run: str) -> dict[str, Any]:
    told = {"round": 0, "left": [], "taken": 0, "need": 2, "running": False}
    return {"run": run, "layout": "dp=1", "addresses": [("127.0.0.1", 1)], **told}


def test_where_nobody_decides_is_refused() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    silent.close()
    client = Client([("127.0.0.1", port)], SECRET, 0, joins(0, ""), patience=0.3)
    with pytest.raises(UserError, match=rf"islands-rendezvous=127.0.0.1:{port} did not answer within 0.3 s; start"):
        client.enter(lambda: None)
    client.close(for_good=False)


def test_a_place_that_is_back_leaves_the_decision_where_the_others_are(tmp_path: Path) -> None:
    run, listeners = island_run(tmp_path, 0, "dp=1", 2), [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    back, second = places = [("127.0.0.1", each.getsockname()[1]) for each in listeners]
    with coordinated(run, listeners[0], SECRET), coordinated(run, listeners[1], SECRET, first=1) as decides:
        alone = Client([second], SECRET, 0, joins(0, "one"))
        alone.enter(lambda: None)
        again = Client(places, SECRET, 1, joins(1, "one"))
        again.enter(lambda: None)
        assert set(again.state["queues"]) == {"0", "1"} and back != second
        for each in (alone, again):
            each.close(for_good=True)
        decides.wait_until_left(5)


def test_who_has_another_secret_or_another_run_is_refused(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    places = [("127.0.0.1", listener.getsockname()[1])]
    with coordinated(island_run(tmp_path, 0, "dp=1", 2), listener, SECRET):
        first = Client(places, SECRET, 0, joins(0, "one"))
        stranger = Client(places, b"another secret of thirty-two bytes", 1, joins(1, "one"))
        with pytest.raises(UserError, match="does not know this job's secret; give all islands the same"):
            stranger.enter(lambda: None)
        time.sleep(0.2)  # whoever comes first has the run that all must have
        other = Client(places, SECRET, 1, joins(1, "another"))
        with pytest.raises(UserError, match="this island has another model, data, seed"):
            other.enter(lambda: None)
        for each in (first, stranger, other):
            each.close(for_good=False)


def served(wire: torch.Tensor) -> tuple[LinkServer, Counts]:
    outbox, counts = Outbox(2, lambda fragment: (0, Held((), wire[:0]))), Counts()
    outbox.put(7, Held(((10, 10 + len(wire)),), wire))
    return LinkServer("127.0.0.1", SECRET, outbox, counts), counts


def test_a_broken_connection_is_resumed_where_it_broke() -> None:
    wire = torch.randint(0, 256, (12_000, 260), dtype=torch.uint8)
    server, _ = served(wire)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=forward, args=(listener, server.port, 1_500_000), daemon=True).start()
    counts, into = Counts(), torch.zeros_like(wire[:11_000])
    link = Link("127.0.0.1", listener.getsockname()[1], SECRET, counts)
    link.fetch(SENT, 0, 7, (10, 11_010), into, lambda: True)
    assert torch.equal(into, wire[:11_000])
    assert counts.received < into.numel() + 4096  # nothing that came was asked for again
    with pytest.raises(Gone):
        link.fetch(SENT, 0, 5, (10, 11), into[:1], lambda: True)
    with pytest.raises((Stranger, OSError)):
        Link("127.0.0.1", server.port, b"another secret of thirty-two bytes", counts)._connected()
    server.close()


def forward(listener: socket.socket, port: int, cut: int) -> None:
    """Connections to a port; the first ends after so many bytes."""
    for most in (cut, 1 << 40):
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))

        def carry(source: socket.socket, target: socket.socket, most: int) -> None:
            with suppress(OSError):
                while most > 0 and (content := source.recv(1 << 16)):
                    target.sendall(content)
                    most -= len(content)
            for line in (source, target):
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=carry, args=(near, far, 1 << 40), daemon=True).start()
        threading.Thread(target=carry, args=(far, near, most), daemon=True).start()
