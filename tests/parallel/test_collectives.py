"""Collectives between ranks that do not share memory: the same results through gloo."""

from __future__ import annotations

import pytest
import torch

from cuboid.launch.pool import Pool
from cuboid.parallel.collectives import all_gather, all_reduce, all_reduce_maximum, reduce_scatter, start_all_gather
from cuboid.parallel.groups import Group


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_gloo_equals_plain_torch(pool: Pool, ranks: int) -> None:
    found = pool.run("tests.parallel.collective_jobs:collect", ([1, 5, 64, 3001], None, False), ranks=ranks)
    assert found == [[]] * ranks


def test_a_group_of_one_never_communicates() -> None:
    alone = Group((4,), 0)
    x = torch.arange(6.0).view(3, 2)
    for collective in (all_reduce, all_reduce_maximum, all_gather, reduce_scatter):
        assert torch.equal(collective(x.clone(), alone), x)
    into = torch.empty(3, 2)
    assert start_all_gather(x, alone, into).wait() is into
    assert torch.equal(into, x)


def test_waiting_twice_changes_nothing(pool: Pool) -> None:
    assert pool.run("tests.parallel.collective_jobs:wait_twice", ranks=2) == [[3.0], [3.0]]
