"""The pool of rank processes: results in order, real process groups, and failures that are reported and survived."""

import os
import time
from multiprocessing import Pipe

import pytest

from cuboid.errors import RankError, UserError
from cuboid.launch.pool import Answer, Pool


def works(pool: Pool, ranks: int = 3) -> bool:
    return pool.run("tests.launch.jobs:sum_of_ranks", ranks=ranks) == [
        (sum(range(ranks)), rank, ranks) for rank in range(ranks)
    ]


def test_results_come_in_the_order_of_ranks(pool: Pool) -> None:
    found = pool.run("tests.launch.jobs:describe", ("word",), ranks=4)
    assert found == [(rank, "word", True) for rank in range(4)]


def test_one_rank_needs_no_process_group(pool: Pool) -> None:
    assert pool.run("tests.launch.jobs:describe", ("alone",), ranks=1) == [(0, "alone", False)]


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_are_joined(pool: Pool, ranks: int) -> None:
    assert works(pool, ranks)
    assert pool.run("tests.launch.jobs:around_the_ring", ranks=ranks) == [(rank - 1) % ranks for rank in range(ranks)]


def test_what_ranks_say_on_their_way_is_heard_in_their_order(pool: Pool) -> None:
    heard: list[tuple[int, int]] = []
    assert pool.run("tests.launch.jobs:count_aloud", (3,), ranks=2, heard=heard.append) == [3, 3]
    assert [number for rank, number in heard if rank == 0] == [0, 1, 2]
    assert len(heard) == 6
    assert works(pool)


def test_processes_are_reused_and_are_not_this_one(pool: Pool) -> None:
    first = pool.run("tests.launch.jobs:process_id", ranks=3)
    assert pool.run("tests.launch.jobs:process_id", ranks=2) == first[:2]
    assert len({*first, os.getpid()}) == 4


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_rank_is_reported_with_its_traceback_and_the_pool_works_again(pool: Pool, failing: int) -> None:
    with pytest.raises(RankError) as caught:
        pool.run("tests.launch.jobs:fail_on", (failing,), ranks=3)
    report = str(caught.value)
    assert report.startswith(f"rank {failing} failed:\nTraceback")
    assert "in fail_on" in report
    assert report.strip().endswith(f"ValueError: rank {failing} has a reason")
    assert works(pool)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_dying_rank_is_reported_and_the_pool_works_again(pool: Pool, dying: int) -> None:
    with pytest.raises(RankError) as caught:
        pool.run("tests.launch.jobs:die_on", (dying,), ranks=3)
    assert str(caught.value) == f"rank {dying} died"
    assert works(pool)


def test_what_the_user_must_mend_comes_out_as_such(pool: Pool) -> None:
    with pytest.raises(UserError, match=r"^model\.vocab=3 is too small; use vocab=4 or more$"):
        pool.run("tests.launch.jobs:refuse_on", (1,), ranks=3)
    assert works(pool)


def test_a_silent_rank_is_given_up(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"^ranks \[1\] gave no answer in 8 s$"):
        pool.run("tests.launch.jobs:sleep_on", (1,), ranks=2, timeout=8)
    assert works(pool)


@pytest.mark.parametrize("job", ["unsendable", "no_such_job"])
def test_a_job_that_cannot_be_named_or_answered_is_reported(pool: Pool, job: str) -> None:
    with pytest.raises(RankError, match=job):
        pool.run(f"tests.launch.jobs:{job}", ranks=1)
    assert works(pool)


def test_a_rank_that_died_between_jobs_is_replaced() -> None:
    with Pool() as pool:
        first = pool.run("tests.launch.jobs:process_id", ranks=2)
        os.kill(first[1], 9)
        wait_for_the_end(first[1])
        assert works(pool, 2)


def test_closing_ends_the_processes() -> None:
    with Pool() as pool:
        found = pool.run("tests.launch.jobs:process_id", ranks=2)
    for process in found:
        wait_for_the_end(process)


def wait_for_the_end(process: int) -> None:
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} still runs")


@pytest.mark.parametrize(
    ("answers", "report"),
    [
        (
            {0: Answer("failed", "peer is gone", 2.0), 2: Answer("failed", "the cause", 1.0)},
            "rank 2 failed:\nthe cause",
        ),
        ({0: Answer("failed", "peer is gone", 2.0), 1: Answer("done", 5, 0.5), 2: None}, "rank 2 died"),
    ],
)
def test_of_several_failures_the_first_is_reported(answers: dict[int, Answer | None], report: str) -> None:
    # On a busy machine all ranks have failed by the time this process looks.
    pipes = [Pipe() for _ in range(3)]
    for rank, answer in answers.items():
        pipes[rank][1].send(answer) if answer else pipes[rank][1].close()
    with pytest.raises(RankError) as caught:
        Pool()._results([ours for ours, _ in pipes], timeout=5)
    assert str(caught.value) == report
