"""A training step on one GPU beside torchtitan's own trainer, in one run: tokens per second, MFU, memory.

    python benchmarks/h200.py 1B:2 3B:1 8B-16L:1                                  # shape:micro-batch[:sequence]
    python benchmarks/h200.py --peer .peers/titan_h200.py --json results.jsonl    # with the peer, a script run alike
    python benchmarks/h200.py --table results.jsonl                               # as docs/performance.md has it

bf16 with float32 master weights and moments, AdamW, clipping, Llama shapes with a vocabulary of 128,256, on the same
kind of text as the peer (random letters: what is computed on changes how much power a GPU draws, and so its speed).
Each measurement has a process of its own, the peer's and ours in turn; the next one imports what it needs, and waits,
while one prepares its model. Both use expandable segments, as the peer's figures do, unless PYTORCH_CUDA_ALLOC_CONF is
set. MFU counts 6 FLOP per parameter and token without the embedding, and attention in full, against 989 TFLOP/s: the
peer's own formula."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # now, while the process before still prepares its model

from cuboid.data.build import BuildRequest, build
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run, build_run
from cuboid.training.cuda_graphs import make_passes
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, run_passes, start_step

SHAPES = {
    "125M": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 2048},
    "1B": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192},
    "3B": {"hidden": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn": 8192},
    "8B-16L": {"hidden": 4096, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 14336},
    "8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336},
}
VOCABULARY = 128256
PEAK = 989e12
STEPS = 12
REPORTED = 3
"""The peer trains so many steps and reports the mean speed of every three; the median of all reports but those with
the compilation in them is taken on both sides."""
LEARNING_RATE, RISING = 8e-4, 2
"""The peer's: the highest, and in how many steps it is reached; then it falls linearly. What has been learned is what
is computed on, and so it matters: the same matmuls of other numbers draw another power."""


def benchmark_run(shape: str, micro_batch: int, sequence: int, store: str, changes: list[str]) -> Run:
    model = {**SHAPES[shape], "family": "llama", "vocab": VOCABULARY, "rope_theta": 500000.0}
    training = {"global_batch": micro_batch, "sequence": sequence, "precision": "bf16", "device": "cuda"}
    table = {"model": model, "layout": f"micro_batch={micro_batch}", "training": training, "data": {"source": store}}
    return build_run(table, changes)


def letters(folder: Path) -> str:
    source = random.Random(0)
    rows = ("".join(source.choices("abcdefgh ijklmnop qrstuvwxyz", k=3000)) for _ in range(2000))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    store = folder / "store"
    build(BuildRequest(sources=(str(folder / "text.jsonl"),), output=store, workers=1))
    return str(store)


def measure(run: Run, steps: int) -> dict[str, Any]:
    device = torch.device("cuda")
    engine = build_engine(run, 0, device)
    optimizer = Optimizer(engine, run.optimizer)
    passes = make_passes(engine, optimizer, partial(run_passes, engine))
    source = make_source(run)
    begun: list[PendingStep] = []
    for step in range(steps):  # as the trainer does: one step is started while the one before computes
        if step == REPORTED:
            torch.cuda.reset_peak_memory_stats()
        batches = micro_batches(source, run, step, 0, device)
        begun.append(start_step(engine, optimizer, batches, learning_rate(step, steps), passes=passes))
        if step:
            begun[-2].result()
    loss = begun[-1].result().loss
    pairs = itertools.pairwise(begun[REPORTED - 1 :])
    seconds = [seconds for before, now in pairs if (seconds := now.seconds_after(before)) is not None]
    reports = [statistics.mean(seconds[first : first + REPORTED]) for first in range(0, len(seconds), REPORTED)]
    median = statistics.median(reports)
    tokens = run.training.global_batch * run.training.sequence
    return {
        "tokens_per_second": tokens / median,
        "mfu": flops_per_token(run) * tokens / median / PEAK,
        "step_seconds": seconds,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "loss": loss,
        "gpu": torch.cuda.get_device_name(),
    }


def learning_rate(step: int, steps: int) -> float:
    return LEARNING_RATE * min((step + 1) / RISING, (steps - step) / (steps - RISING))


def flops_per_token(run: Run) -> float:
    model = run.model
    counted = model.parameters - model.vocab * model.hidden  # looking tokens up is no matmul
    return 6 * counted + 12 * model.layers * model.heads * model.head_dim * run.training.sequence


def run_peer(script: str, shape: str, micro_batch: int, sequence: int) -> None:
    sys.argv = [script, shape, str(micro_batch), str(sequence), "1", "none"]
    runpy.run_path(script, run_name="__main__")


def peer(text: str) -> dict[str, Any] | None:
    """What the peer printed as a result."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    speeds = [float(found.replace(",", "")) for found in re.findall(r"tps: ([\d,]+)", text)]
    memory = [float(found) for found in re.findall(r"memory: ([\d.]+)GiB", text)]
    if len(speeds) < 3:
        return None
    losses = [float(found) for found in re.findall(r"loss: +([\d.]+)", text)]
    settled = speeds[2:]  # reports come after the first step and after every third: the first two hold the compilation
    return {"tokens_per_second": statistics.median(settled), "reserved_gib": max(memory), "loss": losses[-1]}


def ours(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    return dict(json.loads(lines[-1])) if lines and lines[-1].startswith("{") else None


class Measurement:
    """A process that is ready to measure, and waits for a line to begin."""

    def __init__(self, case: str, side: str, arguments: list[str]) -> None:
        self.case, self.side = case, side
        command = [sys.executable, __file__, case, "--side", side, *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ},
        )

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        text, _ = self._process.communicate()
        found = peer(text) if self.side == "peer" else ours(text)
        if found is None:
            lines = text.strip().splitlines() or [f"exit code {self._process.returncode}"]
            errors = [line for line in lines if "Error" in line]
            return {"failed": (errors or lines)[-1][-200:]}
        return found


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "shape × micro-batch × sequence",
        "torchtitan, tokens/s",
        "GiB reserved",
        "Cuboid",
        "MFU",
        "GiB reserved",
        "ratio",
    )
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        shape, micro_batch, sequence = parts(row["case"])
        cells = [f"{shape} × {micro_batch} × {sequence:,}"]
        for side in (row.get("peer", {}), row["cuboid"]):
            cells.append(f"{side['tokens_per_second']:,.0f}" if "tokens_per_second" in side else side.get("failed", ""))
            cells += [f"{side['mfu']:.1%}"] if "mfu" in side else []
            cells.append(f"{side['reserved_gib']:.1f}" if "reserved_gib" in side else "")
        cells.append(f"{row['ratio']:.3f}" if "ratio" in row else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parts(case: str) -> tuple[str, int, int]:
    shape, micro_batch, sequence = (case.split(":") + ["1", "8192"][case.count(":") :])[:3]
    return shape, int(micro_batch), int(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["1B:2", "3B:1", "8B-16L:1"], help="shape:micro-batch[:sequence]")
    parser.add_argument("--steps", type=int, default=STEPS, help="the peer's are always 12")
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    parser.add_argument("--peer", help="the peer's script; its arguments are shape, micro-batch, sequence, 1, none")
    parser.add_argument("--json", type=Path, help="append a line for each case")
    parser.add_argument("--table", type=Path, help="print the table of such lines")
    parser.add_argument("--side", choices=("peer", "cuboid"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 2 * REPORTED:
        parser.error(f"--steps {options.steps} leaves nothing to report; use {2 * REPORTED} or more")
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    if options.side:
        if sys.stdin.readline():  # else the one that would say so has ended
            measure_side(options)
        return
    given = ["--steps", str(options.steps), *(part for change in options.set for part in ("--set", change))]
    given += ["--peer", options.peer] if options.peer else []
    sides = ("peer", "cuboid") if options.peer else ("cuboid",)
    planned = [(case, side) for case in options.cases for side in sides]
    waiting = Measurement(*planned[0], given)
    row: dict[str, Any] = {}
    for following in (*planned[1:], None):
        running = waiting
        running.begin()
        if following is not None:
            waiting = Measurement(*following, given)
        row.setdefault("case", running.case)
        row[running.side] = running.result()
        if running.side == "cuboid":
            report(row, options.json)
            row = {}


def measure_side(options: argparse.Namespace) -> None:
    (case,) = options.cases
    if options.side == "peer":
        run_peer(options.peer, *parts(case))
        return
    with tempfile.TemporaryDirectory() as folder:
        run = benchmark_run(*parts(case), letters(Path(folder)), options.set)
        print(json.dumps(measure(run, options.steps)))


def report(row: dict[str, Any], file: Path | None) -> None:
    row["torch"] = torch.__version__
    if "tokens_per_second" in row.get("peer", {}) and "tokens_per_second" in row["cuboid"]:
        row["ratio"] = row["cuboid"]["tokens_per_second"] / row["peer"]["tokens_per_second"]
    print(json.dumps(row), flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
