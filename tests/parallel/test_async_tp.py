"""Collectives of tensor ranks overlapped with matmuls: every one of a compiled block becomes part of a matmul."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cuboid.launch.pool import Pool
from cuboid.parallel.async_tp_pass import MicroPipelinePass
from tests.matrix import rest
from tests.parallel.cases import losses, small_run

FIELDS = (
    "training.steps=2",
    "data.attention_within_documents=false",
    "training.precision=float32",
    "model.vocab=301",
    "model.layers=1",
)
ALL = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}


@pytest.mark.parametrize(
    ("model", "recompute", "again"),
    [("tiny-gpt2", "selective", {"all_gather_into_tensor": 2}), *rest(("tiny-llama", "none", {}))],
)
def test_every_collective_of_a_block_overlaps_a_matmul(
    pool: Pool, model: str, recompute: str, again: dict[str, int]
) -> None:
    """`again`: what is gathered once more for the weight gradients, which can begin with no part of it."""
    run = small_run(f"tp=2,recompute={recompute}", *FIELDS, "training.compile=on", model=model)
    plain = losses(0, small_run("dp=1", *FIELDS, model=model))
    for found, exchanges in pool.run("tests.parallel.async_tp_jobs:interleaved", (run,), ranks=2):
        assert exchanges == {"forward": ALL, "backward": {**ALL, **again}}
        assert found == pytest.approx(plain, rel=1e-5)


def test_ranks_without_gpus_refuse_it_where_it_is_asked_for(pool: Pool) -> None:
    """With device=auto nobody knows before."""
    fields = (*FIELDS, "training.compile=on", "training.device=auto")
    asked = {wish: small_run("tp=2", *fields, f"training.overlap_tensor={wish}") for wish in ("auto", "on")}
    found = {wish: pool.run("tests.parallel.async_tp_jobs:refusal", (run,), ranks=2) for wish, run in asked.items()}
    assert found == {"auto": ["", ""], "on": ["training.overlap_tensor=on needs GPUs; use overlap_tensor=auto"] * 2}


def traced(function: object, *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """The graph of a function, as compiled ones look after the backward pass is split off."""
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs)


def scattered(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 2, "nobody")


class Alone(torch.fx.Interpreter):
    """Runs a graph of one rank: what it would collective stays as it is."""

    def call_function(self, target: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if target is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            return arguments[0]
        return super().call_function(target, arguments, options)  # type: ignore[arg-type]


def matmuls(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    MicroPipelinePass()(module.graph)
    module.graph.lint()
    module.recompile()
    return module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)


def test_a_sum_of_matmuls_becomes_one() -> None:
    module = traced(
        lambda a, b, c, d, e, f: scattered(a @ b + (c @ d + e @ f)), (4, 3), (3, 6), (4, 5), (5, 6), (4, 2), (2, 6)
    )
    (joined,) = matmuls(module)
    assert [argument.meta["val"].shape for argument in joined.args] == [(4, 10), (10, 6)]
    arguments = [torch.randn(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
    a, b, c, d, e, f = arguments
    assert torch.allclose(Alone(module).run(*arguments), a @ b + c @ d + e @ f, atol=1e-5)


def test_a_bias_is_added_to_what_arrived_and_was_multiplied() -> None:
    def biased(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(bias, torch.ops._c10d_functional.wait_tensor(x), weight).relu()

    module = traced(biased, (6,), (4, 3), (3, 6))
    assert len(matmuls(module)) == 1
    arguments = [torch.randn(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
    assert torch.allclose(module(*arguments), biased(*arguments))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d: scattered(a @ b),
        lambda a, b, c, d: scattered(a @ b + 1),
        lambda a, b, c, d: scattered(torch.add(a @ b, c @ d, alpha=2)),
        lambda a, b, c, d: scattered(a @ b + (a @ b).relu()),
        lambda a, b, c, d: (a @ b + c @ d).relu(),
        lambda a, b, c, d: torch.addmm(d[0], a, b),
    ],
    ids=["one", "number", "weighted", "other", "not exchanged", "biased alone"],
)
def test_other_sums_stay(function: object) -> None:
    module = traced(function, (4, 3), (3, 6), (4, 5), (5, 6))
    before = str(module.graph)
    matmuls(module)
    assert str(module.graph) == before
