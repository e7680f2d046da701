"""A training step on one GPU with the optimizer's state on the device and in CPU memory: speed, memory, bits.

    python benchmarks/gpu_offload.py 3B:1 --json offload.jsonl      # shape:micro-batch[:sequence]
    python benchmarks/gpu_offload.py tiny:2:64 --steps 4            # without a GPU: copies from memory to memory

The shapes, text and settings are those of `h200.py`. In processes of their own, both ways:

1. `--steps` steps as the trainer does them, one started while the one before computes, timed;
2. `--exact` steps with `training.deterministic=true` from the start, of which all losses and what is left in master
   weights and moments must be the same bits both ways (kernels of a fast step add in any order, so its losses may
   differ from one run to the next by themselves);
3. `--exact` updates through the compiled update, with gradients drawn by a seed, both ways in one process: the same
   bits again, and by the way the bytes the link moves in a second.

Bits are compared by two sums over every tensor: of the patterns, and of the patterns times their places. The exit code
is 1 where they differ."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from h200 import SHAPES, benchmark_run, letters
from torch import Tensor

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.device import choose_device
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.spec.run import Run
from cuboid.training.offload import OffloadedState
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, start_step

SHAPES["tiny"] = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
AT_ONCE = 2**26
WARM_UP = 4
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: Tensor, device: torch.device) -> tuple[int, int]:
    patterns = values.detach().flatten().view(BITS[values.element_size()])
    plain = weighted = 0
    for start in range(0, patterns.numel(), AT_ONCE):
        part = patterns[start : start + AT_ONCE].to(device).long()
        places = torch.arange(start, start + part.numel(), device=device)
        plain += int(part.sum())
        weighted += int((part * places).sum())
    return plain, weighted % 2**64


def make(run: Run, device: torch.device) -> tuple[Engine, Optimizer]:
    engine = build_engine(run, 0, device)
    # A CPU's memory is the host's, so there the layout alone would copy nothing.
    by_hand = run.layout.offload and device.type == "cpu"
    return engine, Optimizer(engine, run.optimizer, OffloadedState(engine.units, device) if by_hand else None)


def contents(optimizer: Optimizer, device: torch.device) -> dict[str, list[tuple[int, int]]]:
    found = {}
    for optimizer_shard in optimizer.optimizer_shards:
        first, second = optimizer.moments(optimizer_shard)
        found[optimizer_shard.part.name] = [bits(tensor, device) for tensor in (optimizer_shard.master, first, second)]
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def train(run: Run, device: torch.device, steps: int) -> tuple[list[float], list[float], Engine, Optimizer]:
    """Times and losses of all steps."""
    engine, optimizer = make(run, device)
    source = make_source(run)
    ends, losses = [time.perf_counter()], []
    before: PendingStep | None = None
    for step in range(steps):
        if step == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        now = start_step(engine, optimizer, micro_batches(source, run, step, 0, device), 1e-4)
        if before is not None:
            losses.append(before.result().loss)
        before = now
        ends.append(time.perf_counter())
    synchronize(device)
    if before is not None:
        losses.append(before.result().loss)
    return [end - start for start, end in itertools.pairwise(ends)], losses, engine, optimizer


def timed(run: Run, device: torch.device, steps: int) -> dict[str, Any]:
    seconds, losses, _, optimizer = train(run, device, WARM_UP + steps + 1)
    median = statistics.median(seconds[WARM_UP + 1 :])
    result = {
        "tokens_per_second": run.training.global_batch * run.training.sequence / median,
        "step_seconds": median,
        "host_gib": optimizer.host_bytes / 2**30,
        "state_on_device_gib": optimizer.state_bytes() / 2**30,
        "last_loss": losses[-1],
    }
    if device.type == "cuda":
        result["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return result


def exact(run: Run, device: torch.device, steps: int) -> dict[str, Any]:
    _, losses, _, optimizer = train(run, device, steps)
    return {"losses": losses, "contents": contents(optimizer, device)}


def updated(run: Run, device: torch.device, steps: int) -> dict[str, Any]:
    """Nothing but updates, with drawn gradients."""
    engine, optimizer = make(run, device)
    random = torch.Generator(device).manual_seed(0)
    one = torch.ones((), device=device)
    seconds = []
    for step in range(steps):
        for unit in engine.units:
            unit.begin_step(1)
            unit.wait_for_update()
            for parameter in unit.parameters.values():
                drawn = torch.randn(parameter.shape, generator=random, device=device, dtype=parameter.dtype)
                parameter.grad = 1e-3 * drawn
        synchronize(device)
        start = time.perf_counter()
        optimizer.step(1e-3 * (step + 1), 2 * one, 1.0, one > 0)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    rate = optimizer.host_bytes / statistics.median(seconds[1:] or seconds)
    return {"contents": contents(optimizer, device), "seconds": seconds, "host_bytes_per_second_each_way": rate}


def make_run(options: argparse.Namespace, case: str, offload: bool, text: str, *changes: str) -> Run:
    shape, micro_batch, sequence = (case.split(":") + ["1", "8192"][case.count(":") :])[:3]
    device = choose_device("auto", 0)
    places = [f"training.device={device.type}", f"layout=micro_batch={micro_batch},offload={str(offload).lower()}"]
    return benchmark_run(shape, int(micro_batch), int(sequence), text, [*places, *options.set, *changes])


def both_updated(options: argparse.Namespace, case: str) -> dict[str, Any]:
    device = choose_device("auto", 0)
    found = []
    for offload in (False, True):
        run = make_run(options, case, offload, "python-stdlib", "training.compile=on")
        found.append(updated(run, device, options.exact))
        _give_back(device)
    here, there = found
    equal = here.pop("contents") == there.pop("contents")
    return {"equal": equal, "resident": here, "offloaded": there}


def one(options: argparse.Namespace, case: str, kind: str) -> dict[str, Any]:
    """`kind`: timed or exact, and resident or offloaded; or updates."""
    if kind == "updates":
        return both_updated(options, case)
    device = choose_device("auto", 0)
    what, where = kind.split("-")
    with tempfile.TemporaryDirectory() as folder:
        text = letters(Path(folder))
        if what == "timed":
            return timed(make_run(options, case, where == "offloaded", text), device, options.steps)
        torch.use_deterministic_algorithms(True)
        run = make_run(options, case, where == "offloaded", text, "training.deterministic=true")
        return exact(run, device, options.exact)


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def apart(options: argparse.Namespace, case: str, kind: str) -> dict[str, Any]:
    changes = [part for change in options.set for part in ("--set", change)]
    numbers = ["--steps", str(options.steps), "--exact", str(options.exact)]
    command = [sys.executable, __file__, case, "--one", kind, *numbers, *changes]
    # What deterministic matmuls ask of cuBLAS.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if kind.startswith("exact") else None
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{kind} ended with exit code {done.returncode}")
    return dict(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["3B:1"], help="shape:micro-batch[:sequence]")
    parser.add_argument("--steps", type=int, default=10, help="timed, after those to warm up")
    parser.add_argument("--exact", type=int, default=3, help="compared bit for bit; 0 compares nothing")
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    parser.add_argument("--json", type=Path, help="append every line printed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    differs = False
    for case in options.cases:
        if options.one is not None:
            print(json.dumps(one(options, case, options.one)))
            return
        here, there = (apart(options, case, f"timed-{where}") for where in ("resident", "offloaded"))
        exact_here, exact_there = (apart(options, case, f"exact-{where}") for where in ("resident", "offloaded"))
        updates = apart(options, case, "updates")
        about = {"case": case, "torch": torch.__version__}
        rows: list[dict[str, Any]] = [{**about, "offload": away, **row} for away, row in ((False, here), (True, there))]
        equal = {
            "losses": exact_here["losses"] == exact_there["losses"],
            "states_after_steps": exact_here["contents"] == exact_there["contents"],
            "states_after_updates": updates.pop("equal"),
        }
        ratio = there["tokens_per_second"] / here["tokens_per_second"]
        losses = exact_there["losses"]
        rows.append({**about, "equal": equal, "speed_ratio": ratio, "exact_losses": losses, "updates": updates})
        differs |= not all(equal.values())
        for row in rows:
            print(json.dumps(row), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    sys.exit(differs)


if __name__ == "__main__":
    main()
