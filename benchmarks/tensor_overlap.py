"""Tensor-parallel training with collectives overlapped with matmuls and beside them: the same numbers, and how much
faster.

    python benchmarks/tensor_overlap.py 8B-16L:1 --tp 8 --json overlap.jsonl    # shape:micro-batch[:sequence]
    python benchmarks/tensor_overlap.py small:1:4096 --tp 2                     # on one GPU: the numbers only

Both ways (`training.overlap_tensor=off`, then `on`) in processes of their own, one a rank, from the same weights on the
same text. Compared are all losses and gradient norms, and the gradients of the first step, of which the first moments
of the optimizer are a multiple: they may differ by what adding in another order rounds. The exit code is 1 where they
differ by more, or where `on` took no matmul apart: a step under the profiler counts those.

Ranks that share a GPU speak through gloo unless `--backend nccl` asks for NCCL, and memory is shared within it, without
multicast: right, but slow. Only where every rank has a GPU the ratio of the speeds says something."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from h200 import SHAPES, benchmark_run, letters
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.place import find_place
from cuboid.launch.rank import join
from cuboid.parallel.device import choose_device
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, start_step, train_step

SHAPES["small"] = {"hidden": 1024, "layers": 2, "heads": 16, "kv_heads": 8, "ffn": 4096}
WAYS = ("off", "on")
WARM_UP = 4
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
COMPARED = 2**16
"""Of every tensor so many elements at most."""
TOLERANCE = 0.02
"""Of gradients, relative to the norm of a tensor; bf16 rounds to 0.004, and the next matmul of what it rounded."""
LOSS_TOLERANCE = 2e-3


def make_run(options: argparse.Namespace, text: str, way: str) -> Run:
    shape, micro_batch, sequence = (options.case.split(":") + ["1", "8192"][options.case.count(":") :])[:3]
    layout = f"layout=tp={options.tp},micro_batch={micro_batch},recompute={options.recompute}"
    changes = [layout, f"training.overlap_tensor={way}", *options.set]
    return benchmark_run(shape, int(micro_batch), int(sequence), text, changes)


def rank(options: argparse.Namespace, text: str, way: str, output: Path) -> None:
    place = find_place(os.environ)
    assert place is not None
    device = choose_device("cuda", place.local_rank)
    shared = torch.cuda.device_count() < options.tp
    join(place, device, options.backend or ("gloo" if shared else "auto"))
    run = make_run(options, text, way)
    engine = build_engine(run, place.rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    first = train_step(engine, optimizer, micro_batches(source, run, 0, 0, device), 1e-4)
    seen = [(first.loss, first.gradient_norm)]
    gradients = {
        optimizer_shard.part.name: _some(optimizer.moments(optimizer_shard)[0])
        for optimizer_shard in optimizer.optimizer_shards
    }
    ends: list[float] = []
    before: PendingStep | None = None
    for step in range(
        1, WARM_UP + options.steps + 1
    ):  # as the trainer does: one is started while the one before computes
        now = start_step(engine, optimizer, micro_batches(source, run, step, 0, device), 1e-4)
        if before is not None:
            result = before.result()
            seen.append((result.loss, result.gradient_norm))
        before = now
        ends.append(time.perf_counter())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train_step(engine, optimizer, micro_batches(source, run, 0, 0, device), 1e-4)
    calls = {average.key: average.count for average in profiled.key_averages()}
    seconds = [end - start for start, end in itertools.pairwise(ends[WARM_UP - 1 :])]
    found = {
        "seen": seen,
        "gradients": gradients,
        "step_seconds": statistics.median(seconds),
        "interleaved": {name: calls.get(f"symm_mem::{name}", 0) for name in FUSED},
        "allocated_gib": peak / 2**30,
        "backend": dist.get_backend(),
    }
    torch.save(found, output / f"{way}-{place.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _some(values: Tensor) -> Tensor:
    return values.detach().flatten()[:COMPARED].float().cpu()


def start(options: argparse.Namespace, text: str, way: str, output: Path) -> list[dict[str, Any]]:
    """What every rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = torch.cuda.device_count() < options.tp
    environment = {**os.environ, "WORLD_SIZE": str(options.tp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONFAULTHANDLER"] = "1"
    if shared:
        environment |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--rank", way, text, str(output)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(options.tp)
    ]
    deadline = time.monotonic() + options.timeout
    try:
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            if time.monotonic() > deadline:
                raise SystemExit(f"overlap_tensor={way} takes longer than {options.timeout} s")
            time.sleep(0.2)
    finally:
        for process in ranks:
            process.kill()
        codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit(f"overlap_tensor={way} ended with exit codes {codes}")
    return [torch.load(output / f"{way}-{number}.pt") for number in range(options.tp)]


def compare(off: list[dict[str, Any]], on: list[dict[str, Any]]) -> dict[str, float]:
    """Largest differences, of ranks and steps or tensors."""
    pairs = [pair for one, other in zip(off, on, strict=True) for pair in zip(one["seen"], other["seen"], strict=True)]
    worst = {"gradient": 0.0, "gradient_of": ""}
    for one, other in zip(off, on, strict=True):
        for name, gradient in one["gradients"].items():
            difference = float((gradient - other["gradients"][name]).norm() / gradient.norm().clamp(min=1e-30))
            if difference > worst["gradient"]:
                worst = {"gradient": difference, "gradient_of": name}
    return {
        "loss": max(abs(a[0] - b[0]) / abs(a[0]) for a, b in pairs),
        "gradient_norm": max(abs(a[1] - b[1]) / abs(a[1]) for a, b in pairs),
        **worst,  # type: ignore[dict-item]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="small:1:4096", help="shape:micro-batch[:sequence]")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--backend", choices=("nccl", "gloo"))
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for one of the two ways")
    parser.add_argument("--json", type=Path, help="append a line")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        way, text, output = options.rank
        return rank(options, text, way, Path(output))
    with tempfile.TemporaryDirectory() as folder:
        text = letters(Path(folder))
        off, on = (start(options, text, way, Path(folder)) for way in WAYS)
    different = compare(off, on)
    taken = on[0]["interleaved"]
    right = different["loss"] < LOSS_TOLERANCE and different["gradient"] < TOLERANCE and all(taken.values())
    row = {
        "case": options.case,
        "tp": options.tp,
        "recompute": options.recompute,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "gpus": min(options.tp, torch.cuda.device_count()),
        "backend": on[0]["backend"],
        "right": right,
        "different": different,
        "interleaved_in_a_step": taken,
        "interleaved_when_off": off[0]["interleaved"],
        "step_seconds": {way: found[0]["step_seconds"] for way, found in zip(WAYS, (off, on), strict=True)},
        "ratio": off[0]["step_seconds"] / on[0]["step_seconds"],
        "allocated_gib": {way: found[0]["allocated_gib"] for way, found in zip(WAYS, (off, on), strict=True)},
        "losses": [loss for loss, _ in on[0]["seen"]],
    }
    print(json.dumps(row, indent=1), flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
