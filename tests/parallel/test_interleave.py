"""Exchanges of tensor ranks under products: every one of a compiled block becomes part of a product."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cuboid.launch.pool import Pool
from cuboid.parallel.joined_products import JoinProducts
from tests.parallel.cases import losses, small_run

FIELDS = (
    "training.steps=2",
    "data.attention_within_documents=false",
    "training.precision=float32",
    "model.vocab=301",
    "model.layers=1",
)
ALL = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}


def test_every_exchange_of_a_block_goes_under_a_product(pool: Pool) -> None:
    run = small_run("tp=2", *FIELDS, "training.compile=on")
    plain = losses(0, small_run("dp=1", *FIELDS))
    for found, exchanges in pool.run("tests.parallel.interleave_jobs:interleaved", (run,), ranks=2):
        assert exchanges == {"forward": ALL, "backward": ALL}
        assert found == pytest.approx(plain, rel=1e-5)


def traced(function: object, *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """The graph of a function, as compiled ones look after the backward pass is split off."""
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs)


def scattered(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 2, "nobody")


def products(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    JoinProducts()(module.graph)
    module.graph.lint()
    module.recompile()
    return module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)


def test_a_sum_of_products_becomes_one() -> None:
    module = traced(
        lambda a, b, c, d, e, f: scattered(a @ b + (c @ d + e @ f)), (4, 3), (3, 6), (4, 5), (5, 6), (4, 2), (2, 6)
    )
    (joined,) = products(module)
    assert [argument.meta["val"].shape for argument in joined.args] == [(4, 10), (10, 6)]
    arguments = [torch.randn(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
    left, right = (torch.cat(arguments[start::2], 1 - start) for start in (0, 1))
    a, b, c, d, e, f = arguments
    assert torch.allclose(left @ right, a @ b + c @ d + e @ f, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d: scattered(a @ b),
        lambda a, b, c, d: scattered(a @ b + 1),
        lambda a, b, c, d: scattered(torch.add(a @ b, c @ d, alpha=2)),
        lambda a, b, c, d: scattered(a @ b + (a @ b).relu()),
        lambda a, b, c, d: (a @ b + c @ d).relu(),
    ],
    ids=["one", "number", "weighted", "other", "not exchanged"],
)
def test_other_sums_stay(function: object) -> None:
    module = traced(function, (4, 3), (3, 6), (4, 5), (5, 6))
    before = str(module.graph)
    products(module)
    assert str(module.graph) == before
