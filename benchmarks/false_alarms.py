"""Verifies layouts drawn at random on eight models: none may be said to be wrong.

    python benchmarks/false_alarms.py --layouts 300                     # each in float64 and in bf16
    python benchmarks/false_alarms.py --layouts 10 --precision bf16 --seed 7

The exit code is 1 if any is."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.layout import CONTEXT_METHODS
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
        layout += f",schedule={pick(['gpipe', '1f1b', 'interleaved', 'zb1p', 'zbv', 'dualpipev'])}"
        layout += f",recompute={pick(['none', 'none', 'selective', 'full'])},micro_batch={pick([1, 2])}"
        layout += f",sequence_parallel={pick(['true', 'false'])},ep={pick([1, 1, 2, 4])}"
        settings = [f"training.seed={pick(range(1000))}", f"model.vocab={pick(range(9, 300))}", "model.layers=4"]
        settings += [f"data.attention_within_documents={pick(['true', 'false'])}"]
        settings += [f"optimizer.average={pick([0.0, 0.9])}", f"optimizer.kind={pick(['adamw', 'adamw', 'muon'])}"]
        try:
            run = verification_run(layout, model, tuple(settings), 2, precision)
            check_supported(run)
            return run
        except UserError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=300)
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16"])
    parser.add_argument("--seed", type=int, default=20261118)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    numbers, rows = random.Random(options.seed), []
    with Pool() as pool:
        for number in range(options.layouts):
            model = MODELS[number % len(MODELS)]
            for precision in options.precision:
                run = drawn(numbers, model, precision)
                begin = time.perf_counter()
                verdict = pool.run(
                    "cuboid.verification.compare:verify_rank", (run,), ranks=run.layout.world_size, timeout=600
                )[0]
                row = {"model": model, "layout": verdict["layout"], "precision": precision, "passed": verdict["passed"]}
                rows.append(row | {"seed": run.training.seed, "seconds": time.perf_counter() - begin})
                if not verdict["passed"]:
                    print(f"ALARM {row}\n    {verdict['located']} {verdict['deviations'][:3]}", flush=True)
                if len(rows) % 20 == 0:
                    print(f"{len(rows)} verified", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    alarms = sum(not row["passed"] for row in rows)
    print(f"{len(rows)} layouts of {len(MODELS)} models, {alarms} false alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
