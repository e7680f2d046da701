"""Nodes of a job that stands still show each other what their ranks noted."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.launch.place import Place as JobPlace
from cuboid.launch.place import local_places
from cuboid.launch.rendezvous import serve_store
from cuboid.launch.watched import attempt, beside, judge_with_all, stand_still_everywhere, watched_by_the_first
from cuboid.resilience.diagnosis import diagnose
from cuboid.resilience.watchdog import shared_folder
from cuboid.spec.run import build_run
from cuboid.telemetry.heartbeat import HEARTBEAT, Place, Reading, Waiting
from tests.launch.ports import free_port

DATA = Place("data", (0, 1, 2, 3))


def noted(rank: int) -> Reading:
    """Rank 2 did not come to the collective the others wait in."""
    if rank == 2:
        return Reading(2, 12, "step", 5, "data", counts={DATA: 7})
    return Reading(rank, 10 + rank, "step", 5, waiting=Waiting("all-reduce", DATA, 8), counts={DATA: 8})


def test_all_nodes_come_to_the_same_judgement() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = serve_store(listener)
    nodes = [local_places(2, first, 4, "127.0.0.1", port, "order-1") for first in (0, 2)]
    with ThreadPoolExecutor() as threads:
        judges = [judge_with_all(places[0], patience=60) for places in nodes]
        own = [[noted(place.rank) for place in places] for places in nodes]
        found = list(threads.map(lambda judge, readings: judge(readings), judges, own))
    assert found[0].culprits == (2,)
    assert found[1] == found[0], "the first node judges for all"
    assert diagnose(own[0]).culprits == (2, 3), "alone it cannot tell those of the other node apart"
    for first in (0, 2):
        alone = judge_with_all(local_places(2, first, 4, "127.0.0.1", port, f"order-2-{first}")[0], patience=0.2)
        assert alone(own[0]) == diagnose(own[0]), "the other node has not come, or judges another attempt"
    del store


def test_nodes_have_the_ranks_that_they_show() -> None:
    """Dealt round the nodes, and not as many on each."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = serve_store(listener)
    nodes = {0: (0, 2, 3), 1: (1,)}
    places = [JobPlace(first, 4, 0, len(ranks), "127.0.0.1", port, "a") for first, ranks in nodes.items()]
    with ThreadPoolExecutor() as threads:
        own = [[noted(rank) for rank in ranks] for ranks in nodes.values()]
        judges = [judge_with_all(place, patience=60) for place in places]
        found = list(threads.map(lambda judge, readings: judge(readings), judges, own))
    assert found[0] == found[1] == diagnose([noted(rank) for rank in range(4)])
    many, one = (stand_still_everywhere(place) for place in places)
    assert not many(True), "three of four ranks"
    assert one(True) and many(True)
    del store


def test_who_is_cut_off_judges_by_itself() -> None:
    port = free_port()
    own = [noted(0), noted(1)]
    assert judge_with_all(local_places(2, 0, 4, "127.0.0.1", port, "order-1")[0], patience=0.2)(own) == diagnose(own)
    assert judge_with_all(local_places(2, 0, 2, "127.0.0.1", port, "order-1")[0])(own) == diagnose(own), (
        "all ranks are here"
    )


def test_a_job_stands_still_when_every_node_does() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = serve_store(listener)
    first, second, third = (
        stand_still_everywhere(local_places(2, rank, 6, "127.0.0.1", port, "a")[0]) for rank in (0, 2, 4)
    )
    assert not first(True) and not second(True) and not first(True), "one of three still works"
    assert not second(False)
    assert not third(True)
    assert second(True) and first(True) and third(True)
    again = stand_still_everywhere(local_places(2, 0, 6, "127.0.0.1", port, "b")[0])
    assert not again(True), "another attempt counts anew"
    del store
    assert stand_still_everywhere(local_places(2, 0, 2, "127.0.0.1", port, "a")[0])(True), "all ranks are here"
    cut_off = stand_still_everywhere(local_places(2, 0, 4, "127.0.0.1", free_port(), "a")[0], patience=0.2)
    assert not cut_off(True)


def test_commands_that_write_nothing_leave_reports_of_a_hang_beside_the_run() -> None:
    run = build_run({"model": "tiny-llama", "output": {"folder": "runs/mine"}})
    assert beside(run).output.folder == "runs/mine-hangs"
    assert beside(run).layout == run.layout and run.output.folder == "runs/mine"


def test_ranks_that_torchrun_starts_again_meet_where_nobody_has_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert attempt() == "attempt-0"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert attempt() == "attempt-2"


@pytest.mark.parametrize("made", ["by nobody", "open to others", "a link", "a file", "by another user"])
def test_a_folder_that_others_may_have_made_is_refused(made: str, tmp_path: Path) -> None:
    """Its name can be guessed, and everybody may write beside it."""
    name = f"attempt-{tmp_path.name}"
    folder = shared_folder(name)
    try:
        assert shared_folder(name) == folder, "the ranks of a node have one"
        folder.rmdir()
        if made == "a link":
            folder.symlink_to(tmp_path)
        elif made == "a file":
            folder.touch(0o600)
        elif made != "by nobody":
            folder.mkdir(0o755)
        if made == "by another user" and os.getuid() == 0:  # only who may do everything can make one
            folder.chmod(0o700)
            os.chown(folder, 65534, 65534)
        if made == "by nobody":
            assert shared_folder(name) == folder
        else:
            with pytest.raises(UserError, match=rf"^{folder}, where ranks .*, is not a folder of this user alone; "):
                shared_folder(name)
    finally:
        folder.rmdir() if folder.is_dir() and not folder.is_symlink() else folder.unlink()


def test_a_rank_without_others_is_watched_by_nobody() -> None:
    run = build_run({"model": "tiny-llama"})
    alone = JobPlace(0, 1, 0, 1, "127.0.0.1", 0)
    for place in (None, alone):
        before = threading.active_count(), HEARTBEAT.folder
        with watched_by_the_first(run, place):
            assert (threading.active_count(), HEARTBEAT.folder) == before
