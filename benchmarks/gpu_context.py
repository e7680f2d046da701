"""Context parallelism on one GPU: blocks by the flash kernel against float64, and one rank of a larger mesh.

    python benchmarks/gpu_context.py blocks          every kind of block, forward and backward
    python benchmarks/gpu_context.py step --cp 8     one rank of cp=8 of Llama-3-8B at 131,072 tokens
    python benchmarks/gpu_context.py step --cp 1     the same alone, which does not fit

The second runs under the `fake` process group: real computing, real memory, no peers, so its losses mean nothing."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.model.batch import Documents
from cuboid.model.flash_attention import Attended, attend, attend_backward, plain_backward, plain_forward
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import build_run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step

DEVICE = torch.device("cuda")


def blocks() -> None:
    """Largest relative difference from plain matmuls in float64; bf16 rounds to about 4e-3."""
    torch.manual_seed(0)
    packed = Documents((torch.rand(2, 512) < 0.02).cumsum(1)).edges(DEVICE)
    for name, causal, edges in (("full", False, None), ("causal", True, None), ("documents", True, packed)):
        for heads, shared, value_dim in ((8, 8, 128), (8, 2, 128), (8, 8, 64)):
            sizes = ((heads, 128), (shared, 128), (shared, value_dim), (heads, value_dim))
            coarse = [torch.randn(2, 512, *size, device=DEVICE, dtype=torch.bfloat16) for size in sizes]
            query, key, value, gradient = (x.double() for x in coarse)
            expected = plain_forward(query, key, value, causal, edges)
            expected += plain_backward(gradient, Attended(query, key, value, *expected), causal, edges)
            found = attend(*coarse[:3], causal, edges)
            found += attend_backward(coarse[3], Attended(*coarse[:3], *found), causal, edges)
            errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)]
            shown = " ".join(f"{error:.1e}" for error in errors)
            print(f"{name:>9} heads {heads}/{shared} value {value_dim}: {shown}", "" if max(errors) < 3e-2 else "WRONG")


def step(cp: int, method: str, documents: bool, steps: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
    training = {"steps": steps, "global_batch": 1, "sequence": 131072, "precision": "bf16", "device": "cuda"}
    layout = f"cp={cp},cp_method={method},recompute=full" + (",zero=3" if cp > 1 else "")
    data = {"source": "synthetic", "attention_within_documents": documents}
    run = build_run({"model": "llama3-8b", "layout": layout, "training": training, "data": data})
    try:
        engine = build_engine(run, 0, DEVICE)
        optimizer = Optimizer(engine, run.optimizer)
        for number in range(steps):
            start = time.perf_counter()
            train_step(engine, optimizer, micro_batches(make_source(run), run, number, 0, DEVICE), 1e-4)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"{run.layout}: {time.perf_counter() - start:.2f} s, peak {peak:.1f} GiB", flush=True)
    except torch.OutOfMemoryError as reason:
        print(f"{run.layout}: does not fit ({str(reason).splitlines()[0][:120]})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("blocks", "step"))
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--method", default="ring", choices=("ring", "ulysses", "allgather", "hybrid"))
    parser.add_argument("--documents", action="store_true", help="keep attention inside documents")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    if options.what == "blocks":
        blocks()
    else:
        step(options.cp, options.method, options.documents, options.steps)


if __name__ == "__main__":
    main()
