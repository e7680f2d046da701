"""Blocks that the compiler has made into graphs compute what plain ones do, alone and split over tensor ranks."""

import pytest

from cuboid.launch.pool import Pool
from tests.parallel.cases import losses, small_run

FIELDS = (
    "training.steps=3",
    "training.precision=float32",
    "model.vocab=301",
    "model.layers=4",
    "training.global_batch=4",
    "training.sequence=16",
    "data.attention_within_documents=false",  # else the compiler stops in blocks, and selective ones are not compiled
)
LAYOUTS = [
    "dp=1",
    "dp=2,tp=2,zero=2",
    "dp=2,zero=3",
    "tp=2,recompute=selective",
    "tp=2,recompute=full,recompute_layers=2",
    "tp=2,pp=2,schedule=zbv",
    "tp=2,sequence_parallel=false",
]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_compute_the_same(pool: Pool, layout: str) -> None:
    plain = losses(0, small_run("dp=1", *FIELDS))
    run = small_run(layout, *FIELDS, "training.compile=on")
    for found in pool.run("tests.parallel.cases:losses", (run,), ranks=run.layout.world_size):
        assert found == pytest.approx(plain, rel=1e-5)
