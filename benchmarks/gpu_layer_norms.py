"""What `output.layer_norms` costs: steps of one shape with it and without it, in turn, in one process on one GPU.

    python benchmarks/gpu_layer_norms.py 1B:1               # shape:micro-batch[:sequence], as h200.py names them
    python benchmarks/gpu_layer_norms.py 8B-16L:1 --every 10

`--every`: steps between two measurements (`output.layer_norms_every`). Activations are measured in every step. Steps
without, with activations alone and with all norms follow each other in rounds; the ratio is of medians over rounds."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from h200 import benchmark_run, letters

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.training.layer_norms import LayerNorms
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import start_step

ROUNDS, SETTLED, STEPS = 7, 2, 5


def measure(case: str, every: int) -> None:
    shape, micro_batch, *rest = case.split(":")
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        store = letters(Path(folder))
        sequence = int(rest[0]) if rest else 8192
        run = benchmark_run(shape, int(micro_batch), sequence, store, ["output.layer_norms=true"])
        engine = build_engine(run, 0, device)
        optimizer, source, norms = Optimizer(engine, run.optimizer), make_source(run), LayerNorms(engine)
        # A run without layer norms measures the activations of its last layer.
        modes: dict[str, tuple[int, LayerNorms | None]] = {
            "off": (run.model.layers - 1, None),
            "activations": (0, None),
            "measured": (0, norms),
        }
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        step = 0
        for number in range(ROUNDS):
            for mode, (engine.activations._first, asked) in modes.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                pending = []
                for _ in range(STEPS):
                    step += 1
                    batches = micro_batches(source, run, step, 0, device)
                    pending.append(start_step(engine, optimizer, batches, 1e-4, norms=asked))
                    if len(pending) > 1:
                        pending[-2].result()
                pending[-1].result()
                torch.cuda.synchronize()
                if number >= SETTLED:
                    seconds[mode].append((time.perf_counter() - begin) / STEPS)
    off, activations, measured = (1000 * statistics.median(seconds[mode]) for mode in modes)
    mean = activations + (measured - activations) / every
    print(
        f"{case}: {off:.1f} ms a step without, {activations:.1f} ms with activations, {measured:.1f} ms when measured; "
        f"{mean / off - 1:+.2%} with one measurement in {every} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["1B:1"])
    parser.add_argument("--every", type=int, default=50)
    options = parser.parse_args()
    for case in options.cases:
        measure(case, options.every)


if __name__ == "__main__":
    main()
