"""Collectives through shared memory, against plain torch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cuboid.errors import RankError
from cuboid.launch.pool import Pool
from cuboid.parallel.shm_collectives import SMALL, machine_identity

JOBS = "tests.parallel.collective_jobs"


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_collectives_equal_plain_torch(pool: Pool, ranks: int) -> None:
    """Sizes of one element, of odd numbers, and large enough for the ranks to divide the summing among them."""
    large = SMALL // 8 // ranks
    found = pool.run(f"{JOBS}:collect", ([1, 2, 7, 64, large, large + 1, 3 * large + 5], None), ranks=ranks)
    assert found == [[]] * ranks


@pytest.mark.parametrize(
    ("ranks", "slot_bytes"), [(2, 64), (3, 24 * 7), (4, 32 * 3), (8, 64), (2, 80_000), (3, 120_000)]
)
def test_what_is_larger_than_a_slot_goes_in_pieces(pool: Pool, ranks: int, slot_bytes: int) -> None:
    """One piece exactly, a little more and a little less, and many."""
    elements = slot_bytes // 8 // ranks
    sizes = [elements, elements + 1, max(1, elements - 1), 2 * elements + 3, 5 * elements]
    assert pool.run(f"{JOBS}:collect", (sizes, slot_bytes), ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize("size", [3, SMALL, 1_500_000])
def test_all_ranks_get_the_same_bits(pool: Pool, size: int) -> None:
    found = pool.run(f"{JOBS}:sum_bits", (size,), ranks=4)
    assert len(found[0]) == 4 * size
    assert len(set(found)) == 1


def test_slots_are_not_overwritten_before_they_are_read(pool: Pool) -> None:
    assert pool.run(f"{JOBS}:many_turns", (300,), ranks=4) == [True] * 4


def test_bf16_is_summed_in_float32(pool: Pool) -> None:
    assert pool.run(f"{JOBS}:row_sums", ranks=1) == [(1.0078125, 1.0078125)]


def test_nothing_is_left_in_shared_memory(pool: Pool) -> None:
    for files in pool.run(f"{JOBS}:shared_files", ranks=3):
        assert files and all(name.endswith(" (deleted)") for name in files), "no name is left once all ranks have it"


@pytest.mark.parametrize("dying", [0, 2])
def test_a_dead_peer_is_an_error_at_once(dying: int) -> None:
    with Pool() as pool:
        start = time.monotonic()
        with pytest.raises(RankError, match=rf"^rank {dying} died$"):
            pool.run(f"{JOBS}:die_in_the_middle", (dying,), ranks=3)
        assert time.monotonic() - start < 240


def test_survivors_are_told(tmp_path: Path) -> None:
    """Those who wait for a rank that has ended stop waiting on their own."""
    with Pool() as pool, pytest.raises(RankError, match=r"^rank 1 died$"):
        pool.run(f"{JOBS}:lose_a_peer", (1, str(tmp_path / "waited")), ranks=3)
    for rank in (0, 2):
        seconds, _, told = (tmp_path / f"waited.{rank}").read_text().partition(" ")
        assert float(seconds) < 240
        assert told == "a rank of the group has ended"


def test_processes_of_one_machine_know_each_other(pool: Pool) -> None:
    assert machine_identity() == machine_identity()
    assert pool.run("tests.parallel.collective_jobs:identity", ranks=1) == [machine_identity()]
