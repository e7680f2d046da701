"""Tokens per second, MFU and memory of a training step on one GPU, for Llama shapes with a vocabulary of 128,256.

    python benchmarks/gpu_step.py 1B:2 3B:1 8B-16L:1          # shape:micro-batch, sequences of 8,192 tokens, bf16

MFU counts the model's products without recomputation, attention in full, against 989 TFLOP/s, as torchtitan does."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.apply import build_engine
from cuboid.spec.run import Run, build_run
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import PendingStep, start_step

SHAPES = {
    "1B": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192},
    "3B": {"hidden": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn": 8192},
    "8B-16L": {"hidden": 4096, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 14336},
}
VOCABULARY = 128256
PEAK = 989e12


def benchmark_run(shape: str, micro_batch: int, sequence: int, recompute: str) -> Run:
    model = {**SHAPES[shape], "family": "llama", "vocab": VOCABULARY, "rope_theta": 500000.0}
    layout = f"dp=1,micro_batch={micro_batch},recompute={recompute}"
    training = {"global_batch": micro_batch, "sequence": sequence, "precision": "bf16", "device": "cuda"}
    return build_run({"model": model, "layout": layout, "training": training, "data": {"source": "synthetic"}})


def measure(run: Run, steps: int) -> dict[str, float]:
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    engine = build_engine(run, 0, device)
    optimizer = Optimizer(engine, run.optimizer)
    batches = micro_batches(make_source(run), run, 0, 0, device)
    seconds = []
    before: PendingStep | None = None
    for _ in range(steps + 4):  # as the trainer does: one step is launched while the one before still computes
        now = start_step(engine, optimizer, batches, 1e-5)
        if before is not None:
            before.result()
        before = now
        seconds.append(time.perf_counter())
    torch.cuda.synchronize()
    seconds = [end - start for start, end in itertools.pairwise(seconds[3:])]
    median = statistics.median(seconds)
    tokens = run.training.global_batch * run.training.sequence
    model = run.model
    counted = model.parameters - model.vocab * model.hidden  # looking tokens up is no product
    per_token = 6 * counted + 12 * model.layers * model.heads * model.head_dim * run.training.sequence
    return {
        "tokens_per_second": tokens / median,
        "spread": (max(seconds) - min(seconds)) / median,
        "mfu": per_token * tokens / median / PEAK,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["1B:2", "3B:1", "8B-16L:1"], help="shape:micro-batch")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    for case in options.cases:
        shape, _, micro_batch = case.partition(":")
        run = benchmark_run(shape, int(micro_batch or 1), options.sequence, options.recompute)
        result = measure(run, options.steps)
        print(json.dumps({"case": case, **{key: round(value, 4) for key, value in result.items()}}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
