"""The planner's figures for one GPU beside the GPU's own: peak memory and seconds of computing, case by case.

    python benchmarks/predictions.py --cluster h200x8 --json predictions.jsonl       # all cases, on that GPU
    python benchmarks/predictions.py --cluster h200x8 --only 3B --only 405b           # those whose names contain a word
    python benchmarks/predictions.py --table predictions.jsonl                        # the table of docs/performance.md

A case is a whole training on one GPU, or one rank of a larger job: computing and memory are real, collectives answer at
once (`cuboid probe --rank`). Memory is the most that was allocated at once; what an allocator and a driver keep beside
is not in it, in neither column. Seconds are the median of a step's computing, collectives not counted. How fast the
host launches is measured beside each case, because it differs by half from hour to hour on one machine: the planner's
seconds of the host are taken at that speed."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from h200 import SHAPES, VOCABULARY

from cuboid.probe.expected import expected
from cuboid.probe.one_rank import run_one_rank
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, build_run

LLAMA = {"family": "llama", "vocab": VOCABULARY, "rope_theta": 500000.0}
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One rank of one job."""

    model: str
    layout: str = ""
    sequence: int = 8192
    micro_batches: int = 1
    rank: int = 0
    precision: str = "bf16"

    @property
    def name(self) -> str:
        place = f", rank {self.rank}" if self.rank else ""
        layout = self.layout or "one GPU"
        return f"{self.model}, {layout}, {self.micro_batches} × {self.sequence}, {self.precision}{place}"

    def run(self) -> Run:
        plain = Layout.parse(self.layout)
        training = {
            "global_batch": self.micro_batches * plain.dp * plain.micro_batch,
            "sequence": self.sequence,
            "precision": self.precision,
        }
        model = {**LLAMA, **SHAPES[self.model]} if self.model in SHAPES else self.model
        return build_run({"model": model, "layout": self.layout, "training": training}, [])


CASES = (
    Case("1B", "micro_batch=2"),
    Case("1B", "micro_batch=4", 2048),
    Case("1B", "", 32768),
    Case("1B", "micro_batch=4,recompute=full"),
    Case("3B"),
    Case("3B", "recompute=selective"),
    Case("3B", "recompute=full", 16384),
    Case("3B", "recompute=full,recompute_layers=14", 16384),
    Case("3B", "micro_batch=2", 4096),
    Case("3B", "", 4096, 4),
    Case("8B-16L"),
    Case("8B-16L", "micro_batch=2,recompute=selective"),
    Case("8B-16L", "", precision="fp8"),
    Case("llama3-8b"),
    Case("llama3-8b", "dp=8,zero=3"),
    Case("llama3-8b", "dp=8,zero=1,recompute=selective"),
    Case("llama3-8b", "dp=4,tp=2,zero=2"),
    Case("llama3-8b", "dp=2,tp=4,pp=4,zero=1", micro_batches=8, rank=5),
    Case("llama3-8b", "dp=8,tp=8", micro_batches=2),
    Case("qwen3-8b", "dp=4,tp=2,pp=2,zero=1", micro_batches=4),
    Case("llama3-70b", "dp=8,tp=8,pp=4,zero=1", micro_batches=8),
    Case("llama3-70b", "dp=8,tp=8,pp=4,zero=1", micro_batches=8, rank=255),
    Case("llama3-70b", "dp=16,tp=4,pp=8,zero=2,recompute=selective", 4096, micro_batches=16, rank=260),
    Case("llama3-70b", "dp=32,tp=8,zero=3,recompute=full", 4096),
    Case("llama3.1-405b", "dp=8,tp=8,pp=16,zero=1", micro_batches=16),
    Case("llama3.1-405b", "dp=8,tp=8,pp=16,zero=1", micro_batches=16, rank=512),
    Case("llama3.1-405b", "dp=8,tp=8,pp=16,zero=1", micro_batches=16, rank=1023),
    Case("llama3.1-405b", "dp=8,tp=8,pp=16,zero=3,recompute=full", 4096, micro_batches=16, rank=300),
    Case("gpt3-175b", "dp=16,tp=8,pp=8,zero=1", 2048, micro_batches=16, rank=200),
    Case("qwen3-30b-a3b", "dp=8,ep=8,zero=1", 4096),
    Case("qwen3-30b-a3b", "dp=8,ep=4,zero=2", 4096, rank=3),
    Case("qwen3-30b-a3b", "dp=16,ep=8,zero=3,recompute=full", 4096, rank=9),
    Case("qwen3-30b-a3b", "dp=4,ep=8,tp=2,zero=1", 4096, micro_batches=2),
    Case("qwen3-30b-a3b", "dp=8,ep=8,pp=2,zero=1", 4096, micro_batches=4, rank=12),
    Case("qwen3-235b-a22b", "dp=16,ep=16,pp=8,zero=1,recompute=selective", 4096, micro_batches=8, rank=100),
    Case("qwen3-235b-a22b", "dp=16,ep=16,tp=2,pp=4,zero=1", 4096, micro_batches=4, rank=100),
    Case("mixtral-8x7b", "dp=8,ep=8,zero=1", 4096),
    Case("mixtral-8x7b", "dp=8,ep=4,pp=2,zero=1", 4096, micro_batches=4, rank=9),
    Case("mixtral-8x22b", "dp=8,ep=8,tp=2,pp=4,zero=1", 4096, micro_batches=4, rank=40),
    Case("deepseek-v3", "dp=32,ep=32,pp=16,zero=1,recompute=full", 4096, micro_batches=16, rank=40),
    Case("deepseek-v3", "dp=64,ep=64,pp=8,zero=1,recompute=selective", 4096, micro_batches=8, rank=511),
    Case("qwen3-30b-a3b", "dp=8,ep=8,zero=1,micro_batch=2,recompute=selective", 2048),
    Case("mixtral-8x7b", "dp=16,ep=8,zero=3,recompute=full", 8192),
    Case("mixtral-8x7b", "dp=8,ep=8,pp=2,zero=1,recompute=selective", 8192, micro_batches=4),
    Case("mixtral-8x22b", "dp=16,ep=8,pp=8,zero=2,recompute=full", 4096, micro_batches=8, rank=64),
    Case("mixtral-8x22b", "dp=8,ep=8,tp=4,pp=4,zero=1", 8192, micro_batches=4, rank=127),
    Case("deepseek-v3", "dp=32,ep=32,tp=2,pp=8,zero=1,recompute=full", 8192, micro_batches=8, rank=100),
    Case("deepseek-v3", "dp=128,ep=64,pp=16,zero=2,recompute=selective", 4096, micro_batches=16, rank=500),
    Case("deepseek-v2", "dp=16,ep=16,pp=4,zero=1,recompute=full", 4096, micro_batches=4, rank=20),
    Case("deepseek-v2", "dp=32,ep=32,pp=4,zero=1,recompute=selective", 4096, micro_batches=4, rank=127),
    Case("moe-1t", "dp=64,ep=64,pp=16,zero=1,recompute=full", 4096, micro_batches=16, rank=300),
    Case("qwen3-235b-a22b", "dp=32,ep=32,pp=8,zero=1,recompute=full", 8192, micro_batches=8, rank=70),
    Case("qwen3-235b-a22b", "dp=16,ep=16,tp=2,pp=8,zero=1,recompute=full", 16384, micro_batches=4, rank=1),
    Case("qwen3-30b-a3b", "dp=8,ep=8,zero=1,recompute=full", 16384),
    Case("qwen3-30b-a3b", "dp=8,ep=4,pp=2,zero=2", 8192, micro_batches=4, rank=5),
    Case("qwen3-30b-a3b", "dp=8,ep=8,pp=4,zero=1", 8192, micro_batches=8, rank=20),
    Case("qwen3-30b-a3b", "dp=8,ep=8,tp=2,zero=1,recompute=full", 16384, rank=3),
    Case("qwen3-235b-a22b", "dp=16,ep=16,tp=4,pp=8,zero=1", 16384, micro_batches=4, rank=5),
    Case("qwen3-235b-a22b", "dp=64,ep=64,pp=4,zero=2,recompute=full", 8192, micro_batches=4, rank=200),
    Case("mixtral-8x7b", "dp=8,ep=8,tp=2,pp=2,zero=1", 16384, micro_batches=2, rank=31),
    Case("mixtral-8x7b", "dp=16,ep=4,zero=3,recompute=full", 4096, micro_batches=2, rank=7),
    Case("mixtral-8x22b", "dp=8,ep=4,pp=8,zero=1,recompute=selective", 8192, micro_batches=8, rank=50),
    Case("deepseek-v3", "dp=64,ep=64,pp=16,zero=1,recompute=full", 8192, micro_batches=16, rank=800),
    Case("deepseek-v3", "dp=32,ep=32,tp=4,pp=16,zero=1", 8192, micro_batches=16, rank=1000),
    Case("deepseek-v2", "dp=8,ep=8,tp=2,pp=8,zero=1,recompute=selective", 8192, micro_batches=8, rank=77),
    Case("deepseek-v2", "dp=16,ep=16,pp=8,zero=1", 4096, micro_batches=8, rank=64),
    Case("moe-1t", "dp=128,ep=128,tp=2,pp=8,zero=1,recompute=full", 8192, micro_batches=8, rank=1000),
    Case("qwen3-30b-a3b", "dp=8,ep=8,zero=1,micro_batch=2,recompute=selective", 4096),
    Case("qwen3-30b-a3b", "dp=8,ep=8,pp=2,zero=1,recompute=full", 4096, micro_batches=4, rank=9),
    Case("qwen3-30b-a3b", "dp=8,ep=8,tp=2,pp=2,zero=1,recompute=selective", 8192, micro_batches=4, rank=30),
    Case("mixtral-8x22b", "dp=16,ep=8,tp=2,pp=4,zero=1,recompute=full", 16384, micro_batches=4, rank=33),
    Case("qwen3-235b-a22b", "dp=32,ep=32,tp=2,pp=8,zero=2,recompute=selective", 8192, micro_batches=8, rank=300),
    Case("deepseek-v2", "dp=16,ep=16,tp=4,pp=4,zero=1,recompute=full", 16384, micro_batches=4, rank=200),
    Case("deepseek-v3", "dp=64,ep=32,pp=16,zero=1", 4096, micro_batches=16, rank=700),
    Case("moe-1t", "dp=32,ep=32,tp=4,pp=16,zero=1", 8192, micro_batches=16, rank=1100),
    Case("qwen3-30b-a3b", "dp=8,ep=8,tp=4,zero=1", 16384, rank=2),
    Case("qwen3-30b-a3b", "dp=16,ep=16,pp=2,zero=2,recompute=selective", 8192, micro_batches=4, rank=3),
    Case("qwen3-30b-a3b", "dp=8,ep=8,zero=3,micro_batch=2,recompute=full", 8192, rank=5),
    Case("qwen3-235b-a22b", "dp=16,ep=8,pp=16,zero=1", 8192, micro_batches=16, rank=240),
    Case("qwen3-235b-a22b", "dp=32,ep=32,tp=4,pp=4,zero=1,recompute=selective", 16384, micro_batches=4, rank=60),
    Case("mixtral-8x7b", "dp=4,ep=4,tp=2,pp=4,zero=1", 8192, micro_batches=8, rank=10),
    Case("mixtral-8x7b", "dp=8,ep=8,zero=2,recompute=selective", 4096, rank=1),
    Case("mixtral-8x22b", "dp=8,ep=8,pp=7,zero=1,recompute=full", 16384, micro_batches=4, rank=30),
    Case("deepseek-v2", "dp=32,ep=16,pp=4,zero=3,recompute=full", 8192, micro_batches=4, rank=70),
    Case("deepseek-v2", "dp=20,ep=20,tp=2,pp=4,zero=1", 4096, micro_batches=4, rank=50),
    Case("deepseek-v3", "dp=64,ep=64,tp=2,pp=8,zero=1,recompute=selective", 8192, micro_batches=8, rank=333),
    Case("deepseek-v3", "dp=128,ep=128,pp=8,zero=1,micro_batch=2,recompute=full", 4096, micro_batches=4, rank=900),
    Case("moe-1t", "dp=64,ep=32,pp=8,zero=2,recompute=full", 8192, micro_batches=4, rank=200),
)


def measure(case: Case, cluster: str, steps: int) -> dict[str, Any]:
    run = case.run()
    told = run_one_rank(run, case.rank, steps)
    foreseen = expected(run, case.rank, load_cluster(cluster), told.routing)
    memory = [sum(lines.values()) - lines["buffers"] for lines in (foreseen.memory, told.memory)]
    seconds = [foreseen.seconds, statistics.median(told.seconds)]
    return {
        "case": case.name,
        "predicted_gib": memory[0] / GIB,
        "measured_gib": memory[1] / GIB,
        "memory_error": memory[0] / memory[1] - 1,
        "predicted_seconds": seconds[0],
        "measured_seconds": seconds[1],
        "time_error": seconds[0] / seconds[1] - 1,
        "routing_seconds": told.routing,
        "predicted_lines": {kind: value / GIB for kind, value in foreseen.memory.items()},
        "measured_lines": {kind: value / GIB for kind, value in told.memory.items()},
        "tokens_per_second": run.training.global_batch * run.training.sequence / run.layout.dp / seconds[1],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | memory GiB, predicted | seconds, predicted |", "|---|---|---|"]
    for row in rows:
        memory = f"{row['measured_gib']:.1f}, {row['predicted_gib']:.1f} ({row['memory_error']:+.1%})"
        seconds = f"{row['measured_seconds']:.3f}, {row['predicted_seconds']:.3f} ({row['time_error']:+.1%})"
        lines.append(f"| {row['case']} | {memory} | {seconds} |")
    for kind in ("memory", "time"):
        errors = [abs(row[f"{kind}_error"]) for row in rows]
        lines.append(f"\n{kind}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="h200x8", help="whose catalog entry, or profile, is asked")
    parser.add_argument("--only", action="append", default=[], help="cases whose names contain this")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many first cases")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="append a line for each case")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    rows = []
    for case in CASES[options.skip :]:
        if options.only and not any(word in case.name for word in options.only):
            continue
        try:
            row = measure(case, options.cluster, options.steps)
        except Exception as reason:
            print(json.dumps({"case": case.name, "failed": str(reason)[:300]}), flush=True)
        else:
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        torch.compiler.reset()  # a limit on graphs per function counts all cases together
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rows:
        print(table(rows))


if __name__ == "__main__":
    main()
