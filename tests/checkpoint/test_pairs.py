"""Ranks that copy parts of the state to each other believe nobody else."""

from __future__ import annotations

from cuboid.launch.pool import Pool


def test_two_ranks_copy_also_after_a_failure_and_strangers_do_not(pool: Pool) -> None:
    for secret in (b"the secret of a job, known to both", b""):
        assert pool.run("tests.checkpoint.pairs_jobs:copy", ([secret, secret],), ranks=2) == ["copied", "copied"]


def test_ranks_with_different_secrets_do_not_copy(pool: Pool) -> None:
    told = pool.run("tests.checkpoint.pairs_jobs:copy", ([b"one secret", b"another"],), ranks=2)
    assert told == ["TimeoutError", "Stranger"]


def test_a_rank_that_dies_right_after_its_greeting_is_no_fault_of_the_other(pool: Pool) -> None:
    assert pool.run("tests.checkpoint.pairs_jobs:die_and_come_again", ranks=2) == [[], []]
