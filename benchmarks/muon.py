"""Muon beside AdamW: what it learns at equal tokens, what a step of it takes, and that in time as predicted.

    python benchmarks/muon.py learn                            # a small model on a CPU
    python benchmarks/muon.py learn --hidden 320 --layers 8 --steps 600 --seeds 3 --device cuda --precision bf16
    python benchmarks/muon.py speed 1B:2 8B-16L:1:8192:4       # shape:micro-batch:sequence:micro-batches, on one GPU
    python benchmarks/muon.py update 1B 8B-16L                 # the update alone, on one GPU

`learn`: a Llama on the source of Python's standard library by bytes. Each optimizer has a sweep of learning rates
(powers of two, from a guess outwards until the best has another on both sides), then all seeds at its best; its loss is
the mean of the last steps, and all runs of a seed see the same batches. `--set` changes the run of Muon. `speed`: whole
steps in bf16, both optimizers in one process one after another. `update`: the update alone, with the time that its
arithmetic would take at the rate of large matmuls."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from h200 import benchmark_run, letters
from h200 import measure as measure_steps
from learning_rates import loss_of_last

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.homes import arithmetic, stage_buckets
from cuboid.spec.run import Run, build_run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import apply_update, compute_gradients

KINDS = ("adamw", "muon")
GUESS = {"adamw": -7, "muon": -6}
RATE = 700e12
"""FLOP/s of large matmuls in bf16 on an H200."""


# What it learns.


def learning_run(options: argparse.Namespace, kind: str, exponent: int, seed: int) -> Run:
    table = {
        "model": {
            "name": "small",
            "hidden": options.hidden,
            "layers": options.layers,
            "heads": options.hidden // 32,
            "kv_heads": options.hidden // 32,
            "ffn": 8 * options.hidden // 3 // 16 * 16,
            "vocab": 259,
        },
        "layout": f"micro_batch={options.batch}",
        "training": {
            "steps": options.steps,
            "global_batch": options.batch,
            "sequence": options.sequence,
            "seed": seed,
            "precision": options.precision,
            "device": options.device,
            "compile": "off",  # dozens of short runs, and each would compile anew
        },
        "optimizer": {"kind": kind},
        "learning_rate": {"peak": 2.0**exponent, "warmup_steps": options.steps // 20},
    }
    return build_run(table, options.set if kind == "muon" else ())


def last_loss(options: argparse.Namespace, kind: str, exponent: int, seed: int) -> float:
    """The mean over the last steps; infinite where it diverged."""
    return loss_of_last(learning_run(options, kind, exponent, seed), options)


def learn(options: argparse.Namespace) -> None:
    parameters = learning_run(options, "adamw", 0, 0).model.parameters
    tokens = options.steps * options.batch * options.sequence
    print(f"{parameters / 1e6:.1f} M parameters, {tokens / 1e6:.2f} M tokens, {options.device}, {options.precision}")
    for kind in options.only or KINDS:
        found: dict[int, float] = {}
        wanted = {GUESS[kind]}
        begin = time.perf_counter()
        while wanted:
            for exponent in sorted(wanted):
                found[exponent] = last_loss(options, kind, exponent, 0)
                print(f"  {kind} 2^{exponent}: {found[exponent]:.4f}", flush=True)
            best = min(found, key=lambda exponent: found[exponent])
            wanted = {best - 1, best + 1} - found.keys()
        losses = [found[best], *(last_loss(options, kind, best, seed) for seed in range(1, options.seeds))]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        told = ", ".join(f"{loss:.4f}" for loss in losses)
        seconds = time.perf_counter() - begin
        print(
            f"{kind}: {statistics.fmean(losses):.4f} ± {spread:.4f} at 2^{best} ({told}); {seconds:.0f} s", flush=True
        )


# What a step takes.


def speed(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = letters(Path(folder))
        for case in options.cases:
            shape, micro_batch, sequence, count = (*case.split(":"), "1", "8192", "1")[:4]
            batch = f"training.global_batch={int(micro_batch) * int(count)}"
            medians = {}
            for kind in KINDS:
                changes = [f"optimizer.kind={kind}", batch, *(options.set if kind == "muon" else ())]
                run = benchmark_run(shape, int(micro_batch), int(sequence), store, changes)
                found = measure_steps(run, 12)
                medians[kind] = statistics.median(found["step_seconds"])
                row = {"case": case, "kind": kind, **found}
                if options.json:
                    with Path(options.json).open("a") as file:
                        file.write(json.dumps(row) + "\n")
                print(
                    f"{case} {kind}: {1000 * medians[kind]:.1f} ms, {found['tokens_per_second']:,.0f} tokens/s, "
                    f"{found['allocated_gib']:.2f} GiB, loss {found['loss']:.3f}",
                    flush=True,
                )
                gc.collect()
                torch.cuda.empty_cache()
            print(f"{case}: {medians['muon'] / medians['adamw']:.4f} times the step of AdamW", flush=True)


def update(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, device = letters(Path(folder)), torch.device("cuda")
        for shape in options.cases:
            for kind in KINDS:
                changes = [f"optimizer.kind={kind}", *(options.set if kind == "muon" else ())]
                run = benchmark_run(shape, 1, 1024, store, changes)
                engine = build_engine(run, 0, device)
                optimizer = Optimizer(engine, run.optimizer)
                pending = compute_gradients(engine, micro_batches(make_source(run), run, 0, 0, device))
                seconds = []
                for _ in range(8):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    apply_update(engine, optimizer, pending, 1e-5)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - begin)
                flops = 0
                if kind == "muon":
                    buckets = stage_buckets(run, 0)
                    flops = sum(arithmetic(each.rows, each.columns, 5) for bucket in buckets for each in bucket)
                taken = statistics.median(seconds[3:])
                ideal = f", {1000 * flops / RATE:.2f} ms of it arithmetic at {RATE / 1e12:.0f} TFLOP/s" if flops else ""
                print(f"{shape} {kind}: an update takes {1000 * taken:.2f} ms{ideal}", flush=True)
                del engine, optimizer, pending
                gc.collect()
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learn", "speed", "update"))
    parser.add_argument("cases", nargs="*", default=["1B"])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--set", action="append", default=[], help="of Muon's runs: optimizer.per_head=true")
    parser.add_argument("--only", action="append", choices=KINDS, help="of `learn`: this optimizer")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    {"learn": learn, "speed": speed, "update": update}[options.what](options)


if __name__ == "__main__":
    main()
