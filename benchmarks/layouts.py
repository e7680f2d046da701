"""Tokens per second of eight-rank layouts against one process on the same cores, side by side in one run.

    python benchmarks/layouts.py [--steps 3] [--rounds 2] [--layouts dp=8 pp=8] [--json]

An 8M-parameter Llama, one thread per rank, float32. Every round runs one process and each layout in turn, so that all
of them meet the same state of a shared machine; the median over all timed steps is reported."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run, build_run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step

MODEL = {"hidden": 256, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 4096, "family": "llama"}
LAYOUTS = ["dp=2,tp=2,pp=2", "dp=8", "dp=2,tp=4", "pp=8"]


def benchmark_run(layout: str, steps: int) -> Run:
    training = {"steps": steps, "global_batch": 16, "sequence": 256, "precision": "float32", "device": "cpu"}
    return build_run({"model": dict(MODEL), "layout": layout, "training": training})


def step_seconds(rank: int, run: Run) -> list[float]:
    """Seconds of each step after one to warm up."""
    device = torch.device("cpu")
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    seconds = []
    for step in range(run.training.steps + 1):
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, device)
        start = time.perf_counter()
        train_step(engine, optimizer, batches, 1e-4)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each layout in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = {layout: benchmark_run(layout, options.steps) for layout in ["dp=1", *options.layouts]}
    measured: dict[str, list[float]] = {layout: [] for layout in runs}
    with Pool() as pool:
        for _ in range(options.rounds):
            for layout, run in runs.items():
                measured[layout] += pool.run("layouts:step_seconds", (run,), ranks=run.layout.world_size)[0]
    tokens = 16 * 256
    alone = tokens / statistics.median(measured["dp=1"])
    rows = []
    for layout, seconds in measured.items():
        speed = tokens / statistics.median(seconds)
        rows.append({"layout": layout, "tokens_per_second": speed, "times_one_process": speed / alone})
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'layout':<20}{'tokens/s':>10}{'× one process':>16}")
    for row in rows:
        print(f"{row['layout']:<20}{row['tokens_per_second']:>10.0f}{row['times_one_process']:>16.2f}")


if __name__ == "__main__":
    main()
