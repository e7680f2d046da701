"""A tensor rank that is run alone keeps what it keeps beside others."""

import pytest

from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run

FIELDS = (
    "training.precision=float32",
    "training.compile=on",
    "training.sequence=128",
    "model.layers=1",
    "data.attention_within_documents=false",  # else selective recomputation is not compiled
)


@pytest.mark.parametrize("layout", [pytest.param("tp=2", marks=pytest.mark.thorough), "tp=2,recompute=selective"])
def test_compiled_blocks_keep_the_same(pool: Pool, layout: str) -> None:
    run = small_run(layout, *FIELDS, micro_batches=1)
    first, second = pool.run("tests.probe.fake_jobs:kept_by_blocks", (run,), ranks=2)
    (alone,) = pool.run("tests.probe.fake_jobs:kept_alone", (run,), ranks=1)
    assert first and first == second == alone
