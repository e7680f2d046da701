"""Blocks that the compiler has made into graphs compute what plain ones do, alone and split over tensor ranks."""

import pytest
import torch
from torch._dynamo.utils import counters

from cuboid.launch.pool import Pool
from tests.parallel.cases import losses_and_evaluation, small_run

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
    plain = losses_and_evaluation(0, small_run("dp=1", *FIELDS))
    run = small_run(layout, *FIELDS, "training.compile=on")
    for found in pool.run("tests.parallel.cases:losses_and_evaluation", (run,), ranks=run.layout.world_size):
        assert found == pytest.approx(plain, rel=1e-5)


def test_the_graphs_of_steps_and_of_evaluation() -> None:
    """As the compiler traces them, run operation by operation: no kernels are made, which takes long."""
    plain = losses_and_evaluation(0, small_run("dp=1", *FIELDS))
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        found = losses_and_evaluation(0, small_run("dp=1", *FIELDS, "training.compile=on"))
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    assert len(found) == 5
    assert found == pytest.approx(plain, rel=1e-5)
