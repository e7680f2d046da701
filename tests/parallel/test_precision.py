"""fp8 under layouts: close to float32, known bytes on the wire, and ZeRO 3 gathers it without rounding twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from cuboid.launch.pool import Pool
from cuboid.model import fp8
from cuboid.model.linear import Linear
from cuboid.model.rope import make_positions
from cuboid.model.transformer import Block
from cuboid.parallel.compiled import _Recomputed
from cuboid.spec.model import load_model
from cuboid.spec.run import Run
from tests.parallel.cases import small_run


def fp8_run(layout: str, *overrides: str, model: str = "tiny-llama", scaling: str = "tensor") -> Run:
    fields = ("training.precision=fp8", f"training.fp8_scaling={scaling}", "training.sequence=32")
    return small_run(layout, *fields, *overrides, model=model)


@pytest.mark.parametrize(
    ("layout", "scaling"),
    [
        ("dp=1", "row"),
        ("dp=2,tp=2,pp=2", "tensor"),
        ("dp=2,pp=2,zero=3,schedule=zbv", "row"),
        ("pp=2,schedule=zb1p", "tensor"),
        ("cp=2,tp=2,recompute=selective", "tensor"),
        ("dp=2,pp=2,zero=3,schedule=zb1p", "block"),
    ],
)
def test_fp8_stays_close_to_float32(pool: Pool, layout: str, scaling: str) -> None:
    coarse = fp8_run(layout, scaling=scaling)
    exact = small_run(layout, "training.precision=float32", "training.sequence=32")
    ranks = exact.layout.world_size
    expected = pool.run("tests.parallel.precision_jobs:steps", (exact,), ranks=ranks)[0]
    results = pool.run("tests.parallel.precision_jobs:steps", (coarse,), ranks=ranks)
    assert all(result == results[0] for result in results), "every rank knows the same"
    for (loss, norm, *_), (exact_loss, exact_norm, *_) in zip(results[0], expected, strict=True):
        assert loss == pytest.approx(exact_loss, rel=5e-3)
        assert norm == pytest.approx(exact_norm, rel=5e-2)
        assert loss != exact_loss


def test_experts_in_fp8_stay_close_to_float32(pool: Pool) -> None:
    """Whose rows travel, and whose weight gradients wait."""
    layout = "dp=2,pp=2,ep=2,schedule=zb1p"
    coarse = fp8_run(layout, "training.fp8_experts=true", model="tiny-mixtral", scaling="block")
    exact = small_run(layout, "training.precision=float32", "training.sequence=32", model="tiny-mixtral")
    results, expected = (pool.run("tests.parallel.precision_jobs:steps", (run,), ranks=4)[0] for run in (coarse, exact))
    plain = replace(coarse, training=replace(coarse.training, fp8_experts=False))
    assert results != pool.run("tests.parallel.precision_jobs:steps", (plain,), ranks=4)[0]
    for (loss, norm, *_), (exact_loss, exact_norm, *_) in zip(results, expected, strict=True):
        assert loss == pytest.approx(exact_loss, rel=5e-3)
        assert norm == pytest.approx(exact_norm, rel=5e-2)


@pytest.mark.parametrize(("layout", "model"), [("dp=2,tp=2,zero=3", "tiny-llama"), ("dp=3,zero=3", "tiny-mixtral")])
def test_zero_3_gathers_in_8_bits_what_matmuls_would_have_rounded(pool: Pool, layout: str, model: str) -> None:
    """The same bits as with parameters gathered in bf16, and the bytes that the planner counts."""
    run = fp8_run(layout, model=model)
    ranks = run.layout.world_size
    narrow = pool.run("tests.parallel.precision_jobs:steps", (run,), ranks=ranks)
    wide = pool.run("tests.parallel.precision_jobs:steps_gathered_wide", (run,), ranks=ranks)
    assert narrow == wide
    for lines in pool.run("tests.parallel.cases:unforeseen", (run,), ranks=ranks):
        assert not lines, lines


@pytest.mark.parametrize(
    ("scaling", "recompute"), [("tensor", "none"), ("tensor", "selective"), ("row", "none"), ("block", "selective")]
)
def test_a_block_is_one_graph_that_rounds_each_input_once(
    scaling: fp8.Scaling, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose kernel a CPU has too: queries, keys and values share a rounded input, the 14 matmuls of the
    backward pass none of those of the forward pass, and no weight is kept in fp8."""
    if scaling != "block":
        monkeypatch.setattr(fp8, "multiply", scaled_matmul)
    model = load_model("tiny-llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = Block(model, 0)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)
    block = block.to(torch.bfloat16)
    for child in block.modules():
        if isinstance(child, Linear):
            child.matmul = fp8.Fp8Matmul(scaling)
    graphs: list[tuple[Counter[str], list[Tensor]]] = []

    def note(graph: GraphModule, inputs: list[Tensor]) -> Any:
        graph.graph.eliminate_dead_code()
        shown = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append((Counter(str(node.target) for node in graph.graph.nodes), shown))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    module: nn.Module = _Recomputed(block, block) if recompute == "selective" else block
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    positions = make_positions(model, 64, torch.bfloat16, torch.device("cpu"))
    x = torch.ones(128, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    compiled(x, positions).sum().backward()
    (forward, _), (backward, kept) = graphs
    if scaling == "block":  # selective recomputation rounds inputs again, and multiplies nothing
        operations = [f"cuboid.{name}.default" for name in ("block_matmul", "quantise_both", "quantise_weight")]
        assert [forward[name] for name in operations] == [7, 4, 7]
        assert [backward[name] for name in operations] == [14, 7 + 4, 7]
        return
    by_row = scaling == "row"
    assert (forward["aten._scaled_mm.default"], backward["aten._scaled_mm.default"]) == (7, 14)
    assert forward["aten.amax.default"] == (4 + 7) * (1 if by_row else 2) + by_row * (recompute == "none")
    narrow = [tensor for tensor in kept if tensor.dtype == torch.float8_e4m3fn]
    assert all(128 in tensor.shape for tensor in narrow), "inputs may be, weights are not"


def scaled_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    columns = b_scale.reshape(1, -1) if b_scale.dim() else b_scale
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=columns, out_dtype=dtype, use_fast_accum=fast)
