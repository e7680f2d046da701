"""Proves many layouts one after another with ranks that stay: the table of `docs/performance.md`, "Over NCCL".

    python benchmarks/nccl_layouts.py --device cuda --backend nccl --json float64.json
    python benchmarks/nccl_layouts.py --device cuda --backend nccl --precision bf16 --json bf16.json
    python benchmarks/nccl_layouts.py --only pp=2 tp=2                       # without a GPU: over gloo on CPUs

Each layout is what `cuboid verify` proves: two clipped optimizer steps of a tiny model against one process, in float64
to 1e-9, or in bf16 with compiled blocks to the bounds of `cuboid/verification/rounding.py`. Torch is imported once and
each reference is computed once. On one GPU ranks share it; NCCL then runs over sockets (`cuboid/launch/backend.py`),
which says nothing about speed and everything about order, deadlocks and results. A layout that fails or gives no answer
in `--seconds` is reported as such; fresh ranks prove the rest. The exit code is 1 if any layout is not equal."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.cli.verify import verification_run
from cuboid.errors import RankError, UserError
from cuboid.launch.pool import Pool
from cuboid.spec.layout import SCHEDULES
from cuboid.spec.run import Run

KINDS = ("loss", "gradient", "gradient_norm", "parameter")
SECONDS = {"float64": 180, "bf16": 400}
"""A rank compiles its blocks in bf16, beside all others."""


@dataclass(frozen=True)
class Case:
    layout: str
    model: str = "tiny-llama"
    layers: int = 3
    batch: int = 4
    """Sequences a step. More stages get more micro-batches, so that every phase of a schedule comes."""


PIPELINES = [
    Case(f"pp={pp},schedule={schedule}", layers=2 * pp + (pp < 8), batch=2 * pp)
    for pp in (2, 4, 8)
    for schedule in SCHEDULES
]
DATA = [
    *(Case(f"dp=4,zero={stage}", batch=8) for stage in range(4)),
    *(Case(f"dp=4,zero={stage},shard=2", batch=8) for stage in (1, 2, 3)),
]
TENSOR = [
    Case("tp=2"),
    Case("tp=2,sequence_parallel=false"),
    Case("tp=4"),
    Case("tp=4", "tiny-gpt2"),
    Case("tp=8,recompute=selective"),
]
CONTEXT = [
    *(Case(f"cp=4,cp_method={method}") for method in ("ring", "ulysses", "allgather", "hybrid")),
    Case("cp=2,tp=2,zero=3"),
]
EXPERTS = [
    Case("dp=4,ep=4", "tiny-mixtral"),
    Case("tp=2,dp=2,ep=2,zero=1", "tiny-mixtral"),
    Case("dp=2,ep=4,cp=2,zero=3", "tiny-deepseek"),
    Case("dp=2,ep=2,pp=2,schedule=zbv", "tiny-deepseek", layers=5),
]
MANY = [
    Case("dp=2,tp=2,pp=2,zero=1", layers=5, batch=8),
    Case("dp=2,tp=2,pp=2,zero=2,schedule=zb1p", "tiny-qwen3", layers=5, batch=8),
    Case("dp=2,pp=4,zero=3,schedule=zbv", layers=9, batch=16),
    Case("tp=2,pp=4,schedule=dualpipev,recompute=full", layers=9, batch=8),
    Case("dp=2,cp=2,pp=2,zero=1,schedule=interleaved", layers=5, batch=8),
    Case("dp=2,cp=2,tp=2,pp=2,zero=1", layers=5, batch=8),
    Case("dp=2,cp=2,tp=2,pp=2,ep=4,zero=1,schedule=dualpipev", "tiny-mixtral", layers=5, batch=8),
    Case("dp=4,tp=2,pp=2,zero=3,shard=2,schedule=zbv", layers=5, batch=16),
]
WINDOWS = [
    *(Case(f"cp=4,cp_method={method}", "tiny-gpt-oss") for method in ("ring", "ulysses", "allgather", "hybrid")),
    Case("tp=2,dp=2,zero=3", "tiny-gpt-oss"),
    Case("dp=2,cp=2,tp=2,pp=2,ep=4,zero=1,schedule=zbv", "tiny-gpt-oss", layers=5, batch=8),
]
MTP = "tiny-deepseek-mtp"
PREDICTIONS = [
    *(Case(f"pp=2,schedule={schedule}", MTP, layers=5, batch=4) for schedule in SCHEDULES),
    *(Case(f"cp=4,cp_method={method}", MTP) for method in ("ring", "ulysses", "allgather", "hybrid")),
    *(Case(f"dp=4,zero={stage}", MTP) for stage in range(4)),
    Case("dp=4,zero=3,shard=2", MTP),
    Case("tp=2", MTP),
    Case("tp=4,sequence_parallel=false,recompute=full", MTP),
    Case("dp=2,ep=4,tp=2,zero=2,recompute=selective", MTP),
    Case("dp=2,cp=2,tp=2,pp=2,ep=4,zero=1,schedule=zbv", MTP, layers=5, batch=8),
    Case("dp=2,cp=2,tp=2,pp=2,ep=2,zero=3,schedule=dualpipev", MTP, layers=5, batch=8),
    Case("dp=2,cp=2,tp=2,pp=2,ep=4,zero=2,schedule=interleaved", MTP, layers=5, batch=8),
]
UNEQUAL = [
    Case("dp=2,zero=1,batch_weights=3:1", batch=8),
    Case("dp=2,pp=2,zero=1,batch_weights=2:1,schedule=interleaved", layers=5, batch=12),
    Case("dp=2,tp=2,pp=2,zero=1,batch_weights=1:3,schedule=zbv", layers=5, batch=8),
    Case("dp=2,zero=3,batch_weights=2:1", batch=6),
    Case("dp=2,ep=2,batch_weights=2:1", "tiny-mixtral", batch=6),
    *(Case(f"dp=2,zero={stage},shard_weights=3:1") for stage in (1, 2, 3)),
    Case("dp=4,zero=3,shard=2,shard_weights=1:2", batch=8),
    Case("dp=4,ep=2,zero=2,shard_weights=3:1:2:1", "tiny-mixtral", batch=8),
    Case("dp=2,pp=2,zero=3,batch_weights=2:1,shard_weights=1:2,schedule=dualpipev", layers=5, batch=12),
]
LAYERS = [
    Case("pp=3,layers=6:2:1", layers=9, batch=6),
    Case("pp=2,layers=1:4:1:3,schedule=zbv", layers=9),
    Case("dp=2,pp=2,layers=1:2:5:1,schedule=interleaved", layers=9, batch=8),
    Case("dp=2,pp=2,zero=1,layers=3:1:4:1,schedule=dualpipev", layers=9, batch=8),
    Case("dp=2,pp=2,zero=1,layers=7:2,batch_weights=3:1,schedule=zb1p", layers=9, batch=8),
    Case("dp=2,tp=2,pp=2,zero=3,layers=5:1:1:2,batch_weights=2:1,shard_weights=3:1,schedule=zbv", layers=9, batch=12),
    Case("dp=2,pp=2,ep=2,zero=1,layers=5:2,batch_weights=2:1", "tiny-deepseek", layers=7, batch=12),
]
FLOAT64 = [*PIPELINES, *DATA, *TENSOR, *CONTEXT, *EXPERTS, *MANY, *WINDOWS, *PREDICTIONS, *UNEQUAL, *LAYERS]

BF16 = [
    Case("dp=2", layers=2),
    Case("dp=4,zero=3", layers=2),
    Case("dp=4,zero=2,shard=2", layers=2),
    Case("tp=2", layers=2),
    Case("tp=4", layers=2),
    Case("tp=8", layers=2),
    Case("cp=2", layers=2),
    Case("pp=2", layers=2),
    Case("pp=2,schedule=zb1p", layers=2),
    Case("pp=2,schedule=zbv", layers=4),
    Case("pp=4,schedule=dualpipev", layers=8, batch=8),
    Case("dp=2,ep=2", "tiny-mixtral", layers=2),
    Case("dp=2,tp=2,pp=2,zero=1", layers=2),
    Case("tp=2,pp=2,schedule=zbv", layers=4),
    Case("pp=2", MTP, layers=2),
    Case("tp=2,dp=2", MTP, layers=2),
    Case("tp=2", "tiny-gpt-oss", layers=2),
    Case("cp=2", "tiny-gpt-oss", layers=2),
    Case("dp=2,zero=1,batch_weights=3:1,shard_weights=1:2", layers=2),
    Case("dp=2,zero=3,batch_weights=3:1,shard_weights=1:2", layers=2),
    Case("pp=2,layers=2:1", layers=3),
]
"""Few layers, all of one stage alike: a rank compiles one block."""


def make_run(case: Case, precision: str, device: str, backend: str, more: list[str]) -> Run:
    changes = [
        *more,
        f"model.layers={case.layers}",
        f"training.global_batch={case.batch}",
        "training.sequence=32",
        f"training.device={device}",
        f"training.backend={backend}",
    ]
    if precision == "bf16":  # as a training has it by default: graphs of whole blocks
        changes += ["training.compile=on", "data.attention_within_documents=false"]
    return verification_run(case.layout, case.model, tuple(changes), steps=2, dtype=precision)


def prepare(rank: int, run: Run) -> None:
    """The reference, kept in this process for all layouts that are compared with it."""
    from cuboid.verification.compare import ROUNDED, known_trace, rounded_traces

    if run.training.precision in ROUNDED:
        rounded_traces(run)
        known_trace(run, "float32")
    else:
        known_trace(run)


def prove(rank: int, run: Run) -> dict[str, Any] | None:
    from cuboid.verification.compare import verify_rank

    torch.compiler.reset()  # it takes only so many shapes of one function, and counts those of earlier layouts
    return verify_rank(rank, run)


def attempt(pool: Pool, case: Case, run: Run, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "layout": case.layout,
        "ranks": run.layout.world_size,
        "model": f"{run.model.name}, {run.model.layers} layers",
    }
    settings = {"device": run.training.device, "backend": run.training.backend, "timeout": seconds}
    started = time.monotonic()
    try:
        pool.run("nccl_layouts:prepare", (run,), ranks=1, **settings)
        started = time.monotonic()
        verdict = pool.run("nccl_layouts:prove", (run,), ranks=run.layout.world_size, **settings)[0]
    except (RankError, UserError) as error:
        print(error, file=sys.stderr, flush=True)
        last = str(error).strip().splitlines()[-1]
        row |= {"result": f"FAILED: {last}", "equal": False}
    else:
        row |= {f"{kind}_error": verdict[f"{kind}_error"] for kind in KINDS}
        row |= {"tolerances": verdict["tolerances"], "unforeseen": verdict["unforeseen"]}
        row |= {"result": "equal" if verdict["passed"] else "DIFFERS", "equal": verdict["passed"]}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def line(row: dict[str, Any]) -> str:
    errors = [f"{row[f'{kind}_error']:.1e}" if f"{kind}_error" in row else "" for kind in KINDS]
    cells = [f"`{row['layout']}`", row["ranks"], row["model"], *errors, row["seconds"], row["result"]]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--precision", choices=("float64", "bf16"), default="float64")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="layouts or models that contain one")
    parser.add_argument("--seconds", type=float, help="limit of each layout")
    parser.add_argument("--set", action="append", default=[], help="of every run: optimizer.kind=muon")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows, written as they come")
    options = parser.parse_args()
    cases = FLOAT64 if options.precision == "float64" else BF16
    wanted = options.only or [""]
    chosen = [case for case in cases if any(text in f"{case.layout} {case.model}" for text in wanted)]
    if options.precision == "bf16":  # compilers of all ranks share the cores and a cache on disk
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    rows: list[dict[str, Any]] = []
    print("| layout | ranks | model | loss | gradients | norm | parameters | seconds | result |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    cards, shared = torch.cuda.device_count() if options.device == "cuda" else 0, False
    with Pool() as pool:
        for case in chosen:
            run = make_run(case, options.precision, options.device, options.backend, options.set)
            if 1 < cards < run.layout.world_size and not shared:
                pool.close()  # new ranks: NCCL reads its settings once, and these begin to share GPUs
                shared = True
            rows.append(attempt(pool, case, run, options.seconds or SECONDS[options.precision]))
            print(line(rows[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1))
    equal = sum(row["equal"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    print(f"\n{equal} of {len(rows)} layouts equal one process, {options.precision}, {seconds:.0f} s")
    raise SystemExit(0 if rows and equal == len(rows) else 1)


if __name__ == "__main__":
    main()
