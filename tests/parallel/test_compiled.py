"""Blocks that the compiler has made into graphs compute what plain ones do, alone and split over tensor ranks."""

import pytest
import torch
from torch._dynamo.utils import counters

from cuboid.launch.pool import Pool
from tests.matrix import rest
from tests.parallel.cases import losses, losses_and_evaluation, small_run

FIELDS = (
    "training.steps=3",
    "training.precision=float32",
    "model.vocab=301",
    "model.layers=4",
    "training.global_batch=4",
    "training.sequence=16",
)
LAYOUTS = [
    "dp=1",
    "dp=2,tp=2,zero=2",
    "dp=2,zero=3",
    "tp=2,recompute=selective",
    "tp=2,recompute=full,recompute_layers=2",
    "tp=2,pp=2,schedule=zbv",
    "pp=2,schedule=zb1p,recompute=full",
    "pp=2,schedule=zb1p,recompute=selective,zero=3",
    "tp=2,sequence_parallel=false",
]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_compute_the_same(pool: Pool, layout: str) -> None:
    plain = losses_and_evaluation(0, small_run("dp=1", *FIELDS))
    run = small_run(layout, *FIELDS, "training.compile=on")
    for found in pool.run("tests.parallel.cases:losses_and_evaluation", (run,), ranks=run.layout.world_size):
        assert found == pytest.approx(plain, rel=1e-5)


@pytest.mark.thorough
def test_blocks_that_would_write_over_what_waits(pool: Pool) -> None:
    """As those of a Llama happen not to."""
    fields = (*FIELDS[:3], "model.layers=5")
    plain = losses_and_evaluation(0, small_run("dp=1", *fields, model="tiny-qwen3", micro_batches=4))
    layout = "pp=2,schedule=zbv,recompute=selective"
    run = small_run(layout, *fields, "training.compile=on", model="tiny-qwen3", micro_batches=4)
    for found in pool.run("tests.parallel.cases:losses_and_evaluation", (run,), ranks=2):
        assert found == pytest.approx(plain, rel=1e-5)


def test_the_graphs_of_steps_and_of_evaluation() -> None:
    """As the compiler traces them, run operation by operation: no kernels are made, which takes long. Documents are
    others in every batch, and no graph is made anew for them."""
    graphs = []
    for within in ("true", "false"):
        fields = (*FIELDS, "model.layers=2", f"data.attention_within_documents={within}")
        plain = losses_and_evaluation(0, small_run("dp=1", *fields))
        counters.clear()
        torch.compiler.reset()
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            found = losses_and_evaluation(0, small_run("dp=1", *fields, "training.compile=on"))
        assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
        assert len(found) == 5
        assert found == pytest.approx(plain, rel=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("model", ["tiny-deepseek", *rest("tiny-gpt2")])
def test_the_graphs_of_tensor_ranks(pool: Pool, model: str) -> None:
    """Several linears of slices of one input between two collectives; GPT-2 has one."""
    fields = ("training.steps=2", *FIELDS[1:3], "model.layers=2", "training.global_batch=2", *FIELDS[5:])
    plain = losses_and_evaluation(0, small_run("dp=1", *fields, model=model))
    run = small_run("tp=2", *fields, "training.compile=on", model=model)
    for found, stops in pool.run("tests.parallel.cases:traced", (run,), ranks=2):
        assert found == pytest.approx(plain, rel=1e-5)
        assert not stops


@pytest.mark.parametrize(
    ("model", "layout"),
    [("tiny-deepseek", "dp=2,ep=2,recompute=selective"), *rest(("tiny-qwen3-moe", "tp=2,ep=2,recompute=full"))],
)
def test_the_graphs_beside_experts(pool: Pool, model: str, layout: str) -> None:
    """The compiler stops at experts; under selective recomputation attention alone is a graph."""
    fields = ("training.steps=2", *FIELDS[1:3], "model.layers=2", "training.global_batch=2", *FIELDS[5:])
    plain = losses_and_evaluation(0, small_run("dp=1", *fields, model=model))
    run = small_run(layout, *fields, "training.compile=on", model=model)
    for found, _ in pool.run("tests.parallel.cases:traced", (run,), ranks=2):
        assert found == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-gpt-oss", "dp=2,ep=2,recompute=selective"),
        ("tiny-gemma2", "tp=2"),
        *rest(("tiny-gemma3", "tp=2"), ("tiny-olmo3", "tp=2,recompute=full")),
    ],
)
def test_the_graphs_around_windows(pool: Pool, model: str, layout: str) -> None:
    """The compiler stops at norms over the heads of all tensor ranks, and nowhere else in attention."""
    fields = ("training.steps=2", *FIELDS[1:3], "model.layers=3", "training.global_batch=2", *FIELDS[5:])
    plain = losses_and_evaluation(0, small_run("dp=1", *fields, "model.windows=[6, 0]", model=model))
    run = small_run(layout, *fields, "model.windows=[6, 0]", "training.compile=on", model=model)
    for found, _ in pool.run("tests.parallel.cases:traced", (run,), ranks=2):
        assert found == pytest.approx(plain, rel=1e-5)


SQUARES = ("model.hidden=128", "model.heads=2", "model.kv_heads=2", "model.ffn=256", "training.fp8_scaling=block")
"""Projections whose weights are whole squares, and so are fused."""


@pytest.mark.parametrize("change", [("layout.recompute=full",), ("training.precision=fp8", *SQUARES)])
def test_weight_gradients_of_compiled_blocks_wait(pool: Pool, change: tuple[str, ...]) -> None:
    fields = ("training.steps=2", "model.layers=2", *FIELDS[2:3], *FIELDS[4:], "training.precision=float32", *change)
    plain = losses(0, small_run("dp=1", *fields))
    run = small_run("pp=2,schedule=zb1p", *fields, "training.compile=on")
    for rank, (found, waited) in enumerate(pool.run("tests.parallel.cases:traced_split", (run,), ranks=2)):
        # What fp8 rounds to depends on the order of sums, and so on the processor.
        assert found == pytest.approx(plain, rel=3e-3 if SQUARES[0] in change else 1e-5)
        # The first rank has nobody before it to wait for its gradients.
        assert waited == ({"layers.1", "head"} if rank else set())


@pytest.mark.parametrize("layout", ["tp=2,recompute=selective", *rest("dp=1")])
def test_compiled_blocks_with_scales_of_squares(pool: Pool, layout: str) -> None:
    """Fused projections have the scales of each by itself: the same numbers, until sums in another order (of ranks, of
    an update) are rounded to others."""
    wide = ("model.hidden=256", "model.heads=2", "model.kv_heads=2", "model.ffn=512", SQUARES[-1])
    fields = ("training.steps=2", "model.layers=2", *FIELDS[2:3], *FIELDS[4:], "training.precision=fp8", *wide)
    plain = losses(0, small_run("dp=1", *fields))
    run = small_run(layout, *fields, "training.compile=on")
    for found, _ in pool.run("tests.parallel.cases:traced_split", (run,), ranks=run.layout.world_size):
        assert found[0] == pytest.approx(plain[0], rel=1e-5 if layout == "dp=1" else 3e-3)
        assert found == pytest.approx(plain, rel=3e-3)
