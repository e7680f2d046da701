"""Jobs of the tests of async tensor parallelism: compiled graphs are looked at, then run operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor import compile_fx, config
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from cuboid.errors import UserError
from cuboid.parallel import parallelize
from cuboid.parallel.async_tp import options
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from tests.parallel.cases import CPU, losses

INTERLEAVED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
ALONE = ("all_gather_into_tensor", "reduce_scatter_tensor")
Counts = dict[str, dict[str, int]]


@contextmanager
def _looking(found: Counts) -> Iterator[None]:
    """torch.compile with its own passes and without its kernels; a CPU can neither share memory with NCCL's groups nor
    take matmuls apart, so torch's own stand-ins do both (`_test_mode` and the fallbacks)."""

    def keep_graph(module: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        compile_fx.view_to_reshape(module)
        with torch.no_grad():
            fake = compile_fx.fake_tensor_prop(module, inputs)
        with V.set_fake_mode(fake):
            post_grad_passes(module, bool(options.get("is_inference")))
        names = Counter(str(node.target).split(".")[-2] for node in module.graph.nodes if "." in str(node.target))
        exchanges = {name: names[name] for name in (*INTERLEAVED, *ALONE) if names[name]}
        if exchanges:
            found["backward" if options.get("is_backward") else "forward"] = exchanges
        module.recompile()
        return module.forward

    library = torch.library.Library("symm_mem", "IMPL")
    for name in INTERLEAVED:
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    with (
        patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=keep_graph)),
        patch.object(dist, "is_nccl_available", lambda: True),
        symmetric_memory._test_mode(),
        config.patch(force_disable_caches=True),
    ):
        yield


def interleaved(rank: int, run: Run) -> tuple[list[float], Counts]:
    """Losses, and which collectives the graphs of a block have."""
    found: Counts = {}
    torch._dynamo.reset()
    with _looking(found), patch.object(parallelize, "compiler_options", lambda *_: options()):
        return losses(rank, run), found


def refusal(rank: int, run: Run) -> str:
    try:
        build_engine(run, rank, CPU)
    except UserError as error:
        return str(error)
    return ""
