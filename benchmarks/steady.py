"""The steady training step on one GPU: what the host waits for in it, where the device's time goes, how even it is.

    python benchmarks/steady.py 1B:2 3B:1 8B-16L:1 --json steady.jsonl      # shape:micro-batch[:sequence]
    python benchmarks/steady.py tiny:2:64 --steps 50                        # without a GPU, what a CPU can tell

The shapes, text and settings are those of `h200.py`, and steps are run as the trainer runs them, kernel by kernel (no
CUDA graphs, in which nobody could see what waits): one is started while the one before computes, then the host waits
for that one's result. Four passes over the same engine:

1. times of `--steps` steps (p5, median, p95, largest, smallest), and how long the host needs to start one;
2. a step under `torch.cuda.set_sync_debug_mode("warn")`, which names every line that waits for the device;
3. a step under `"error"`, which such a line would end;
4. `--profiled` steps under torch.profiler. Calls of the CUDA runtime that wait are counted by name: inside the start of
   a step there may be none, and in the wait for the one before only that wait. Time of kernels is given by class, the
   optimizer's by where they were launched; idle is what no kernel or copy covers.

Each case has a process of its own. The exit code is 1 where a step waits for the device."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from h200 import SHAPES, benchmark_run, flops_per_token, letters
from torch.profiler import ProfilerActivity, profile, record_function

from cuboid.data.loader import micro_batches
from cuboid.data.source import Source, make_source
from cuboid.parallel.device import choose_device
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.telemetry.profiler_regions import REGIONS
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, start_step

SHAPES["tiny"] = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
START, WAIT = "start of a step", "wait for the step before"
UPDATE = "update of this step"
"""The region of `cuboid train --profile`."""
WAITS = re.compile(
    r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(?!\w*Async)\w*|cuMemcpy(?!\w*Async)\w*|cudaFree(Host)?$"
)
"""Names of calls that return when the device has got so far."""
DRIVER_MEMORY = re.compile(r"cudaMalloc\w*|cudaHostAlloc|cudaHostRegister|cuMem(Create|Map|Unmap|Release)\w*")
"""Calls that may wait, and that a steady step has no reason for."""
CLASSES = (
    ("attention", r"sdpa|fmha|flash|attention|cudnn_generated"),
    ("matmuls", r"nvjet|gemm|cutlass|cublas|splitk|xmma|_mm_"),
    ("copies", r"memcpy|memset|copy_kernel|direct_copy"),
    ("norm of the gradient", r"multi_tensor|pow_sum|foreach|sum_squares"),
    ("loss", r"loss_and_gradient"),
    ("element-wise", r"triton|elementwise|reduce|softmax|index|embedding|cat|fill|scatter|gather"),
)


class Steps:
    """The trainer's loop: a step is started, then the one before is waited for."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.engine = build_engine(run, 0, device)
        self.optimizer = Optimizer(self.engine, run.optimizer)
        self.source: Source = make_source(run)
        self.done = 0
        self.earlier: PendingStep | None = None
        self.before: PendingStep | None = None
        self.ends: list[float] = []
        self.intervals: list[float] = []
        """Seconds between the ends of two steps, by the device's clock where it has one."""
        self.starts: list[float] = []
        """Seconds the host needed to start a step."""

    def start(self) -> PendingStep:
        HEARTBEAT.enter("step", self.done + 1)
        batches = micro_batches(self.source, self.run, self.done, 0, self.device)
        return start_step(self.engine, self.optimizer, batches, 1e-5)

    def go(self, steps: int, start: Callable[[], PendingStep] | None = None) -> float:
        """The loss of the last step but one: the last is still being computed."""
        loss = float("nan")
        for _ in range(steps):
            begun = time.perf_counter()
            with record_function(START):
                now = (start or self.start)()
                HEARTBEAT.do("")
            self.starts.append(time.perf_counter() - begun)
            if self.before is not None:
                with record_function(WAIT):
                    loss = self.before.result().loss
                self.ends.append(time.perf_counter())
                if self.earlier is not None:
                    told = self.before.seconds_after(self.earlier)
                    self.intervals.append(self.ends[-1] - self.ends[-2] if told is None else told)
            self.earlier, self.before = self.before, now
            self.done += 1
        return loss


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(run.training.device, 0)
    loop = Steps(run, device)
    loop.go(options.warm_up)
    loop.intervals, loop.starts = [], []
    loss = loop.go(options.steps)
    tokens = run.training.global_batch * run.training.sequence
    times = loop.intervals
    row: dict[str, Any] = {"times": spread(times, loop.starts), "loss": loss}
    row["tokens_per_second"] = tokens / statistics.median(times)
    row["tflops"] = flops_per_token(run) * row["tokens_per_second"] / 1e12
    row["lines_that_wait"] = lines_that_wait(loop) if device.type == "cuda" else "no GPU"
    row["under_error_mode"] = under_error_mode(loop) if device.type == "cuda" else "no GPU"
    return row | profiled_steps(loop, options.profiled, options.trace)


def spread(times: list[float], starts: list[float]) -> dict[str, float]:
    ranked, median = sorted(times), statistics.median(times)
    low, high = (ranked[round(part * (len(ranked) - 1))] for part in (0.05, 0.95))
    return {
        "steps": len(times),
        "median_ms": 1e3 * median,
        "p5_ms": 1e3 * low,
        "p95_ms": 1e3 * high,
        "smallest_ms": 1e3 * ranked[0],
        "largest_ms": 1e3 * ranked[-1],
        "deviation_over_mean": statistics.stdev(times) / statistics.mean(times),
        "p95_minus_p5_over_median": (high - low) / median,
        "largest_minus_smallest_over_median": (ranked[-1] - ranked[0]) / median,
        "host_starts_a_step_in_ms": 1e3 * statistics.median(starts),
    }


def lines_that_wait(loop: Steps) -> list[str]:
    """Where the start of a step calls something that waits for the device, as torch sees it."""
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.go(1, lambda: _in_mode("warn", loop.start))
    torch.set_warn_always(False)
    told = Counter(f"{line.filename}:{line.lineno}" for line in caught if "synchronizing" in str(line.message))
    return [f"{place} ({count} times)" for place, count in told.items()]


def under_error_mode(loop: Steps) -> str:
    try:
        loop.go(1, lambda: _in_mode("error", loop.start))
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return f"refused: {str(error).splitlines()[0]}"
    return "passed"


def _in_mode(mode: str, start: Callable[[], PendingStep]) -> PendingStep:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        return start()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profiled_steps(loop: Steps, steps: int, trace: Path | None) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU]
    if loop.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        REGIONS.begin()
        loop.go(steps + 2)  # the profiler's own beginning and end touch the first and the last
        REGIONS.end()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    regions = {name: _regions(events, name)[1:-1] for name in (START, WAIT)}
    count = len(regions[START])
    if loop.device.type != "cuda":
        return {"profiled_steps": count, "waits": "no GPU", "device_time": "no GPU"}
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    pageable = [event for event in events if "Pageable" in event["name"]]
    launched = {event["args"].get("correlation"): event["ts"] for event in calls}
    waits: dict[str, dict[str, Any]] = {}
    for name, spans in regions.items():
        inside = [event["name"] for event in calls if _within(event["ts"], spans)]
        waits[name] = {
            "waiting_calls": dict(Counter(call for call in inside if WAITS.match(call))),
            "driver_memory_calls": dict(Counter(call for call in inside if DRIVER_MEMORY.match(call))),
            "copies_of_pageable_memory": sum(
                _within(launched.get(event["args"].get("correlation"), -1.0), spans) for event in pageable
            ),
        }
    own_waits = sum(waits[WAIT]["waiting_calls"].values())
    waiting = any(waits[START].values()) or own_waits > count or waits[WAIT]["copies_of_pageable_memory"] > 0
    return {
        "profiled_steps": count,
        "waits": waits,
        "calls_in_a_step": dict(Counter(event["name"] for event in calls if _within(event["ts"], regions[START]))),
        "waits_for_the_device": waiting,
        "device_time": device_time(events, launched, regions[START]),
    }


def device_time(events: list[dict[str, Any]], launched: dict[Any, float], spans: list[tuple[float, float]]) -> Any:
    """Milliseconds a step by class: of what these steps launched, and of the time from their first kernel to the first
    of the step after."""
    updates = _regions(events, UPDATE)
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    mine = [event for event in work if _within(launched.get(event["args"].get("correlation"), -1.0), spans)]
    first = min(event["ts"] for event in mine)
    last = max(event["ts"] + event["dur"] for event in mine)
    later = [event["ts"] for event in work if event["ts"] >= last]
    wall = min(later, default=last) - first
    classes: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in mine:
        in_update = _within(launched[event["args"]["correlation"]], updates)
        classes["optimizer" if in_update else _class(event["name"])] += event["dur"]
        kernels[event["name"]][0] += event["dur"]
        kernels[event["name"]][1] += 1
    classes["idle"] = wall - _covered((event["ts"], event["ts"] + event["dur"]) for event in mine)
    per_step = 1e3 * len(spans)
    ranked = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "wall_ms": wall / per_step,
        "kernels_a_step": len(mine) / len(spans),
        "by_class_ms": {name: total / per_step for name, total in sorted(classes.items(), key=lambda item: -item[1])},
        "idle_part": classes["idle"] / wall,
        "largest": [
            {"name": name[:100], "ms": total / per_step, "a_step": number / len(spans)}
            for name, (total, number) in ranked[:25]
        ],
    }


def _class(name: str) -> str:
    return next((kind for kind, words in CLASSES if re.search(words, name, re.IGNORECASE)), "other")


def _regions(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    found = (event for event in events if event["name"] == name and event.get("cat") == "user_annotation")
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def _within(moment: float, spans: list[tuple[float, float]]) -> bool:
    return any(start <= moment <= end for start, end in spans)


def _covered(intervals: Any) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["1B:2", "3B:1", "8B-16L:1"], help="shape:micro-batch[:sequence]")
    parser.add_argument("--warm-up", type=int, default=30, help="steps before them: a GPU slows down as it gets warm")
    parser.add_argument("--steps", type=int, default=60, help="timed steps")
    parser.add_argument("--profiled", type=int, default=4, help="steps under the profiler")
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    parser.add_argument("--trace", type=Path, help="keep the trace of the last case here")
    parser.add_argument("--json", type=Path, help="append a line for each case")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if options.one:
        shape, micro_batch, sequence = (options.cases[0].split(":") + ["1", "8192"][options.cases[0].count(":") :])[:3]
        changes = [*([] if on_gpu else ["training.device=cpu"]), *(["model.vocab=512"] if shape == "tiny" else [])]
        with tempfile.TemporaryDirectory() as folder:
            run = benchmark_run(shape, int(micro_batch), int(sequence), letters(Path(folder)), [*changes, *options.set])
            print(json.dumps(measure(run, options)))
        return 0
    failed = False
    for case in options.cases:
        arguments = [case, "--one", "--steps", str(options.steps), "--profiled", str(options.profiled)]
        arguments += ["--warm-up", str(options.warm_up)]
        arguments += [part for change in options.set for part in ("--set", change)]
        arguments += ["--trace", str(options.trace)] if options.trace else []
        done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
        device = torch.cuda.get_device_name() if on_gpu else "no GPU"
        row: dict[str, Any] = {"case": case, "torch": torch.__version__, "device": device}
        row |= {"failed": done.returncode} if done.returncode else json.loads(done.stdout.strip().splitlines()[-1])
        failed = (
            failed
            or "failed" in row
            or row.get("waits_for_the_device", False)
            or bool(on_gpu and (row["lines_that_wait"] or row["under_error_mode"] != "passed"))
        )
        print(json.dumps(row, indent=1), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
