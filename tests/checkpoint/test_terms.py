"""One node at a time leads a run, whoever tries: the run's folder decides."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest

from cuboid.checkpoint.terms import Fence, Term, Terms
from cuboid.errors import UserError
from cuboid.secure_channel import make_secret
from cuboid.training.claim import claimed, try_claim


def race(folder: Path, barrier: object, name: str, won: object) -> None:
    terms = Terms(folder)
    for number in range(1, 21):
        barrier.wait()  # type: ignore[attr-defined]
        if terms.take(Term(number, name, "127.0.0.1", 1)):
            won.put((number, name))  # type: ignore[attr-defined]


def test_of_many_who_take_a_term_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(4), context.Queue()
    racers = [context.Process(target=race, args=(tmp_path, barrier, name, won)) for name in "abcd"]
    for racer in racers:
        racer.start()
    numbers = sorted(won.get(timeout=30)[0] for _ in range(20))
    for racer in racers:
        racer.join(30)
    assert numbers == list(range(1, 21)) and won.empty()
    newest = Terms(tmp_path).newest()
    assert newest is not None and newest.number == 20
    assert len(list(tmp_path.iterdir())) == 1, "older ones are forgotten, and nothing is left of the race"


def test_who_leads_says_so_and_a_newer_term_is_seen(tmp_path: Path) -> None:
    terms = Terms(tmp_path)
    assert terms.newest() is None
    first = Term(1, "a", "10.0.0.1", 29400)
    assert terms.take(first) and not terms.take(first)
    assert terms.newest() == first
    beaten = terms.beat(first)
    assert terms.newest() == beaten and beaten.beat == 1
    assert terms.take(Term(2, "b"))
    terms.beat(beaten)  # one that does not know yet
    newest = terms.newest()
    assert newest is not None and newest.number == 2
    (tmp_path / "leader-00000001.json").unlink()
    assert not terms.take(Term(1, "c")), "it looked before the second was taken"
    newest = terms.newest()
    assert newest is not None and newest.number == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"leader": 1}', b"\xff\xff", b"null"])
def test_a_damaged_term_is_taken_all_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leader-00000007.json").write_bytes(content)
    assert Terms(tmp_path).newest() == Term(7)
    assert not Terms(tmp_path).take(Term(7, "a"))
    assert Terms(tmp_path).take(Term(8, "a"))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    terms = Terms(tmp_path)
    first = Term(1, "a")
    assert terms.take(first)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        failed = 0
        for write in (lambda: terms.beat(first), lambda: terms.take(first), lambda: make_secret(tmp_path)):
            try:
                write()
            except (OSError, UserError):
                failed += 1
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["leader-00000001.json"]


def test_ranks_of_an_earlier_term_publish_nothing(tmp_path: Path) -> None:
    fence, terms = Fence(), Terms(tmp_path)
    fence.check()  # one supervisor has all ranks
    terms.take(Term(4, "a"))
    fence.set(str(tmp_path), 4)
    fence.check()
    terms.take(Term(5, "b"))
    with pytest.raises(OSError, match="another node leads this run now"):
        fence.check()
    (tmp_path / "leader-00000005.json").unlink()  # begun anew with --overwrite
    with pytest.raises(OSError, match="another node leads this run now"):
        fence.check()


def test_a_claim_is_taken_when_its_holder_is_gone(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(BlockingIOError):
        try_claim(tmp_path)
    assert try_claim(tmp_path) is not None
