"""Muon beside AdamW: what it learns at equal tokens, what a step of it takes, and that in time as predicted.

    python benchmarks/muon.py learn                            # a small model on a CPU
    python benchmarks/muon.py learn --hidden 320 --layers 8 --steps 100 --batch 8 --jobs 8 --threads 2   # 16 cores
    python benchmarks/muon.py learn --shape 1B --steps 150 --batch 4 --sequence 2048 --device cuda --precision bf16 \
        --compile on --jobs 2 --guess adamw=-12 muon=-9        # 1B on one GPU, two runs at a time
    python benchmarks/muon.py speed 1B:2:8192:32 --steps 2     # shape:micro-batch:sequence:micro-batches, on one GPU
    python benchmarks/muon.py update 1B 8B-16L                 # the update alone, on one GPU

`learn`: a Llama on the source of Python's standard library by bytes. Each optimizer has a sweep of learning rates
(powers of two, from a guess outwards until the best has another on both sides), then all seeds at its best; a loss is
the mean of the last steps, and all runs of a seed see the same batches. `--jobs` runs so many at once, in processes.
`--set` changes the run of Muon. `speed`: whole steps in bf16, both optimizers in one process, some steps of one and
then of the other, beside what the planner says. `update`: the update alone, with the time that its arithmetic would
take at the rate of large matmuls."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from h200 import LEARNING_RATE, SHAPES, VOCABULARY, benchmark_run, letters
from learning_rates import loss_of_last

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.probe.expected import expected
from cuboid.spec.cluster import load_cluster
from cuboid.spec.matrix_owners import arithmetic, stage_buckets
from cuboid.spec.run import Run, build_run
from cuboid.training.cuda_graphs import make_passes
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, apply_update, compute_gradients, run_passes, start_step

KINDS = ("adamw", "muon")
GUESS = {"adamw": -7, "muon": -6}
RATE = 700e12
"""FLOP/s of large matmuls in bf16 on an H200."""


# What it learns.


def learning_run(options: argparse.Namespace, kind: str, exponent: int, seed: int) -> Run:
    small = {
        "hidden": options.hidden,
        "layers": options.layers,
        "heads": options.hidden // 32,
        "kv_heads": options.hidden // 32,
        "ffn": 8 * options.hidden // 3 // 16 * 16,
        "vocab": 259,
    }
    large = {"family": "llama", "vocab": VOCABULARY, "rope_theta": 500000.0, **SHAPES.get(options.shape, {})}
    table = {
        "model": large if options.shape else {"name": "small", **small},
        "layout": f"micro_batch={options.batch}",
        "training": {
            "steps": options.steps,
            "global_batch": options.batch,
            "sequence": options.sequence,
            "seed": seed,
            "precision": options.precision,
            "device": options.device,
            "compile": options.compile,
        },
        "optimizer": {"kind": kind},
        "learning_rate": {"peak": 2.0**exponent, "warmup_steps": options.steps // 20},
    }
    return build_run(table, options.set if kind == "muon" else ())


def last_loss(options: argparse.Namespace, kind: str, exponent: int, seed: int) -> float:
    """The mean over the last steps; infinite where it diverged."""
    begin = time.perf_counter()
    loss = loss_of_last(learning_run(options, kind, exponent, seed), options)
    print(f"  {kind} 2^{exponent}, seed {seed}: {loss:.4f} in {time.perf_counter() - begin:.0f} s", flush=True)
    torch.compiler.reset()  # it takes only so many models of one function, and counts those of earlier runs
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return loss


def sweep(options: argparse.Namespace, processes: Executor, kind: str) -> list[float]:
    """Losses by seed at the best rate."""
    found: dict[int, float] = {}
    guess = options.guesses[kind]
    wanted = {guess - 1, guess, guess + 1}
    begin = time.perf_counter()
    while wanted:
        exponents = sorted(wanted)
        tasks = [processes.submit(last_loss, options, kind, exponent, 0) for exponent in exponents]
        found |= {exponent: task.result() for exponent, task in zip(exponents, tasks, strict=True)}
        best = min(found, key=lambda exponent: found[exponent])
        wanted = {best - 1, best + 1} - found.keys()
    others = [processes.submit(last_loss, options, kind, best, seed) for seed in range(1, options.seeds)]
    losses = [found[best], *(task.result() for task in others)]
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    told, rates = ", ".join(f"{loss:.4f}" for loss in losses), {f"2^{key}": round(found[key], 4) for key in found}
    seconds = time.perf_counter() - begin
    print(f"{kind}: {statistics.fmean(losses):.4f} ± {spread:.4f} at 2^{best} ({told}); {rates}; {seconds:.0f} s")
    return losses


def learn(options: argparse.Namespace) -> None:
    parameters = learning_run(options, "adamw", 0, 0).model.parameters
    tokens = options.steps * options.batch * options.sequence
    print(f"{parameters / 1e6:.1f} M parameters, {tokens / 1e6:.2f} M tokens, {options.device}, {options.precision}")
    kinds = options.only or KINDS
    os.environ["OMP_NUM_THREADS"] = str(options.threads or max(1, (os.cpu_count() or 1) // options.jobs))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn) as processes, ThreadPoolExecutor(len(kinds)) as sweeps:
        losses = list(sweeps.map(partial(sweep, options, processes), kinds))
    if len(losses) > 1:
        apart = [one - other for one, other in zip(*losses, strict=True)]
        print(f"{kinds[0]} less {kinds[1]}, by seed: {', '.join(f'{each:.4f}' for each in apart)}")


# What a step takes.


class Training:
    """Steps of one optimizer."""

    def __init__(self, run: Run) -> None:
        self.run, self.device, self.steps = run, torch.device("cuda"), 0
        self.engine = build_engine(run, 0, self.device)
        self.optimizer, self.source = Optimizer(self.engine, run.optimizer), make_source(run)
        self.passes = make_passes(self.engine, self.optimizer, partial(run_passes, self.engine))
        self.seconds: list[float] = []
        self.loss = 0.0

    def several(self, count: int) -> None:
        """One after another, as a training has them; the first one and what it waits for are not counted."""
        begun: list[PendingStep] = []
        for _ in range(count + 1):
            batches = micro_batches(self.source, self.run, self.steps, 0, self.device)
            begun.append(start_step(self.engine, self.optimizer, batches, LEARNING_RATE, passes=self.passes))
            self.steps += 1
        self.loss = begun[-1].result().loss
        taken = [now.seconds_after(before) for before, now in pairwise(begun)]
        self.seconds += [each for each in taken if each is not None]


def speed(options: argparse.Namespace) -> None:
    cluster = load_cluster("h200x8")
    with tempfile.TemporaryDirectory() as folder:
        store = letters(Path(folder))
        for case in options.cases:
            shape, micro_batch, sequence, count = (*case.split(":"), "1", "8192", "1")[:4]
            batch = f"training.global_batch={int(micro_batch) * int(count)}"
            trainings = {}
            for kind in KINDS:
                changes = [f"optimizer.kind={kind}", batch, *(options.set if kind == "muon" else ())]
                trainings[kind] = Training(benchmark_run(shape, int(micro_batch), int(sequence), store, changes))
                trainings[kind].several(2)  # compiles
                trainings[kind].seconds.clear()
            for number in range(options.rounds):
                for kind in KINDS if number % 2 else reversed(KINDS):
                    trainings[kind].several(options.steps)
            medians = {kind: statistics.median(each.seconds) for kind, each in trainings.items()}
            for kind, each in trainings.items():
                foreseen = expected(each.run, 0, cluster).seconds
                row = {"case": case, "kind": kind, "step_seconds": each.seconds, "predicted_seconds": foreseen}
                if options.json:
                    with Path(options.json).open("a") as file:
                        file.write(json.dumps(row) + "\n")
                tokens = each.run.training.global_batch * each.run.training.sequence
                print(
                    f"{case} {kind}: {1000 * medians[kind]:.1f} ms ({1000 * min(each.seconds):.1f} to "
                    f"{1000 * max(each.seconds):.1f}), {tokens / medians[kind]:,.0f} tokens/s, predicted "
                    f"{1000 * foreseen:.1f} ms ({foreseen / medians[kind] - 1:+.1%}), loss {each.loss:.3f}",
                    flush=True,
                )
            print(f"{case}: {medians['muon'] / medians['adamw']:.4f} times the step of AdamW", flush=True)
            del trainings, each
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()


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
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of `learn`: in place of --hidden and --layers")
    parser.add_argument("--steps", type=int, help="of a run: 200; of `speed`, of one optimizer in a row: 3")
    parser.add_argument("--rounds", type=int, default=4, help="of `speed`: of steps of both")
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="of `learn`: runs at once, each in a process of its own")
    parser.add_argument("--threads", type=int, default=0, help="of each; 0: all cores by --jobs")
    parser.add_argument("--guess", nargs="+", default=[], metavar="KIND=EXPONENT", help="where a sweep begins")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", choices=("on", "off"), default="off", help="small runs take less without")
    parser.add_argument("--set", action="append", default=[], help="of Muon's runs: optimizer.per_head=true")
    parser.add_argument("--only", action="append", choices=KINDS, help="of `learn`: this optimizer")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    options.guesses = GUESS | {kind: int(each) for kind, each in (given.split("=") for given in options.guess)}
    options.steps = options.steps or (200 if options.what == "learn" else 3)
    {"learn": learn, "speed": speed, "update": update}[options.what](options)


if __name__ == "__main__":
    main()
