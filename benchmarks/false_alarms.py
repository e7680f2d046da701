"""Verifies layouts drawn at random on eight models: none may be said to be wrong.

    python benchmarks/false_alarms.py --layouts 300                     # each in float64 and in bf16
    python benchmarks/false_alarms.py --layouts 10 --precision bf16 --seed 7
    python benchmarks/false_alarms.py --jobs 8 --part 1/2               # eight at once; the first half of them

The exit code is 1 if any is."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from at_once import Place, part_of, tried

from cuboid.errors import RankError, UserError
from cuboid.spec.layout import CONTEXT_METHODS, STAGES_PER_RANK
from cuboid.spec.run import Run, check_supported
from cuboid.verification.make import verification_run

MODELS = (
    "tiny-llama",
    "tiny-gpt2",
    "tiny-qwen3",
    "tiny-mixtral",
    "tiny-deepseek",
    "tiny-gemma3",
    "tiny-olmo3",
    "tiny-gpt-oss",
)


def drawn(numbers: random.Random, model: str, precision: str) -> Run:
    """On at most eight ranks; drawn again where the rules refuse it."""
    pick = numbers.choice
    while True:
        dp, tp, pp, cp = pick([1, 2, 3, 4]), pick([1, 2, 4]), pick([1, 2, 3]), pick([1, 1, 2, 4])
        if not 1 < dp * tp * pp * cp <= 8:
            continue
        layout = f"dp={dp},tp={tp},pp={pp},cp={cp},cp_method={pick(CONTEXT_METHODS)},zero={pick(range(4))}"
        schedule = pick(["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"])
        layout += f",schedule={schedule}"
        stages = pp * (STAGES_PER_RANK[schedule] or 2)
        if 1 < stages <= 4 and pick([True, False]):
            layout += f",layers={5 - stages}" + ":1" * (stages - 1)
        layout += f",recompute={pick(['none', 'none', 'selective', 'full'])},micro_batch={pick([1, 2])}"
        layout += f",sequence_parallel={pick(['true', 'false'])},ep={pick([1, 1, 2, 4])}"
        for name in ("batch_weights", "shard_weights"):
            if dp > 1 and pick([True, False]):  # replicas are refused shards where zero=0
                layout += f",{name}={pick([2, 3])}" + ":1" * (dp - 1)
        settings = [f"training.seed={pick(range(1000))}", f"model.vocab={pick(range(9, 300))}", "model.layers=4"]
        settings += [f"data.attention_within_documents={pick(['true', 'false'])}"]
        settings += [f"optimizer.average={pick([0.0, 0.9])}", f"optimizer.kind={pick(['adamw', 'adamw', 'muon'])}"]
        try:
            run = verification_run(layout, model, tuple(settings), 2, precision)
            check_supported(run)
            return run
        except UserError:
            continue


LIMIT = 300
"""Seconds until a layout counts as stuck."""


def attempt(place: Place, run: Run) -> dict[str, Any]:
    begin = time.perf_counter()
    row = {"model": run.model.name, "layout": str(run.layout), "precision": run.training.precision}
    row["settings"] = {
        "training.seed": run.training.seed,
        "model.vocab": run.model.vocab,
        "data.attention_within_documents": run.data.attention_within_documents,
        "optimizer.average": run.optimizer.average,
        "optimizer.kind": run.optimizer.kind,
    }
    try:
        verdict = place.run("cuboid.verification.compare:verify_rank", (run,), run.layout.world_size, LIMIT)
        row |= {key: verdict[key] for key in ("passed", "located", "deviations")}
    except RankError as error:
        row |= {"passed": False, "located": None, "deviations": [], "crashed": str(error)[-1500:]}
    return row | {"seconds": time.perf_counter() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=300)
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16"])
    parser.add_argument("--seed", type=int, default=20261118)
    parser.add_argument("--jobs", type=int, default=1, help="so many at once, each on its own share of the cores")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of them alone")
    parser.add_argument("--json", type=Path, help="written anew after each layout")
    options = parser.parse_args()
    numbers, rows = random.Random(options.seed), []
    runs = [
        drawn(numbers, MODELS[number % len(MODELS)], precision)
        for number in range(options.layouts)
        for precision in options.precision
    ]
    for row in tried(part_of(runs, options.part), options.jobs, attempt):
        rows.append(row)
        if not row["passed"]:
            print(f"ALARM {row}", flush=True)
        if len(rows) % 20 == 0:
            print(f"{len(rows)} verified", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    alarms = sum(not row["passed"] for row in rows)
    slowest = max(row["seconds"] for row in rows)
    models = len({row["model"] for row in rows})
    print(f"{len(rows)} layouts of {models} models, {alarms} false alarms, slowest {slowest:.0f} s")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
