"""Jobs of Muon that run on the ranks of the pool."""

from __future__ import annotations

from unittest.mock import patch

from cuboid.spec import matrix_owners
from cuboid.spec.run import Run
from tests.parallel.cases import losses, unforeseen


def many_buckets(rank: int, run: Run) -> tuple[int, list[str], list[float]]:
    """Buckets of a rank where they are short, and what it then communicates otherwise than planned, and
    its losses."""
    with patch.object(matrix_owners, "BUCKET", 1000):
        matrix_owners.stage_buckets.cache_clear()
        try:
            return len(matrix_owners.stage_buckets(run, 0)), unforeseen(rank, run), losses(rank, run)
        finally:
            matrix_owners.stage_buckets.cache_clear()
