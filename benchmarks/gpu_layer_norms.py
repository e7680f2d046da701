"""What `output.layer_norms` costs: steps of one shape with it and without it, in turn, in one process on one GPU.

    python benchmarks/gpu_layer_norms.py 1B:2               # shape:micro-batch[:sequence], as h200.py names them
    python benchmarks/gpu_layer_norms.py 8B-16L:1 --every 1

`--every`: steps between two logged ones (`output.log_every`). Activations are measured in every step, the other norms
in logged ones. Ten rounds of as many steps on each side; the ratio is of the medians over rounds."""

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

ROUNDS, SETTLED = 10, 2


def measure(case: str, every: int) -> None:
    shape, micro_batch, *rest = case.split(":")
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        store = letters(Path(folder))
        sequence = int(rest[0]) if rest else 8192
        run = benchmark_run(shape, int(micro_batch), sequence, store, ["output.layer_norms=true"])
        engine = build_engine(run, 0, device)
        optimizer, source, norms = Optimizer(engine, run.optimizer), make_source(run), LayerNorms(engine)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        step = 0
        for number in range(SETTLED + ROUNDS):
            for measured in (False, True):
                engine.activations._first = 0 if measured else run.model.layers - 1
                torch.cuda.synchronize()
                begin = time.perf_counter()
                pending = []
                for _ in range(max(every, 5)):
                    step += 1
                    asked = norms if measured and step % every == 0 else None
                    batches = micro_batches(source, run, step, 0, device)
                    pending.append(start_step(engine, optimizer, batches, 1e-4, norms=asked))
                    if len(pending) > 1:
                        pending[-2].result()
                pending[-1].result()
                torch.cuda.synchronize()
                if number >= SETTLED:
                    seconds[measured].append((time.perf_counter() - begin) / max(every, 5))
    without, with_norms = (statistics.median(seconds[measured]) for measured in (False, True))
    print(
        f"{case}, logged every {every}: {1000 * without:.1f} ms a step without, {1000 * with_norms:.1f} ms with layer "
        f"norms: {with_norms / without - 1:+.2%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["1B:2"])
    parser.add_argument("--every", type=int, nargs="+", default=[10, 1])
    options = parser.parse_args()
    for case in options.cases:
        for every in options.every:
            measure(case, every)


if __name__ == "__main__":
    main()
