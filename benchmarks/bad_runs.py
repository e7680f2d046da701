"""Do good runs stay silent, and do bad ones say what is wrong? python benchmarks/bad_runs.py [--steps 100] [--json]

Twenty good runs of all families, at learning rates from 3e-4 to 3e-3 and several batches, must not warn at all. One run
with a deliberately bad setting for each kind of warning must warn of that kind within 50 steps. All on one CPU process,
a few minutes. Exit code 1 if a run does otherwise."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cuboid.spec.run import build_run
from cuboid.training.trainer import train

WITHIN = 50
"""Steps in which a bad run must say so."""
DENSE, ROUTED = ("tiny-llama", "tiny-gpt2", "tiny-qwen3"), ("tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek")
FAST = ("learning_rate.peak=3e-3", "learning_rate.warmup_steps=20")
GOOD = [
    *((model, f"learning_rate.peak={peak}") for model in (*DENSE, *ROUTED) for peak in ("3e-4", "1e-3")),
    *((model, *FAST) for model in (*DENSE, *ROUTED)),
    ("tiny-llama", "training.global_batch=2", "training.sequence=128"),
    ("tiny-llama", "data.source=synthetic", "learning_rate.peak=3e-3"),
]
UNBALANCED = ("model.mixture.balance_coefficient=0", "model.mixture.bias_rate=0", "model.mixture.router_noise=0")
BAD = [
    ("first loss", "tiny-llama", "model.initialization=flat", "model.initial_std=1"),
    ("gradient norm", "tiny-gpt2", "model.initialization=flat", "model.initial_std=10"),
    ("loss", "tiny-qwen3", "learning_rate.peak=1"),
    ("activations", "tiny-llama", "learning_rate.peak=0.1"),
    ("collapsed routers", "tiny-qwen3-moe", *UNBALANCED, "learning_rate.peak=0.03"),
    ("dead experts", "tiny-deepseek", *UNBALANCED, "learning_rate.peak=0.3"),
]


def warnings_of(model: str, settings: list[str], steps: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        sizes = {"steps": steps, "global_batch": 8, "sequence": 32, "device": "cpu"}
        rates = {"warmup_steps": 5}
        table = {"model": model, "training": sizes, "learning_rate": rates, "output": {"folder": folder}}
        run = build_run(table, ["model.layers=2", *settings])
        start = time.perf_counter()
        with redirect_stderr(StringIO()):
            train(run, 0, torch.device("cpu"), quiet=True)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    told = [{"step": row["step"], **warning} for row in rows for warning in row.get("warnings", ())]
    return {
        "model": model,
        "settings": " ".join(settings),
        "losses": [round(rows[0]["loss"], 2), round(rows[-1]["loss"], 2)],
        "largest_norm": max(row["gradient_norm"] or 0.0 for row in rows),
        "activation": rows[-1]["activation_rms"],
        "warnings": told,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of a good run")
    parser.add_argument("--bad", action="store_true", help="only bad runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("", *case) for case in ([] if arguments.bad else GOOD)] + list(BAD)
    results, wrong = [], 0
    for kind, model, *settings in cases:
        result = warnings_of(model, settings, WITHIN if kind else arguments.steps)
        found = {warning["kind"] for warning in result["warnings"]}
        result |= {"expected": kind, "right": kind in found if kind else not found}
        wrong += not result["right"]
        results.append(result)
        if not arguments.json:
            first, last = result["losses"]
            said = "; ".join(f"step {each['step']}: {each['text']}" for each in result["warnings"]) or "silent"
            sign = "ok   " if result["right"] else "WRONG"
            line = f"{sign} {kind or 'good':<17} {model:<14} {result['settings']:<70} loss {first} → {last}  "
            print(f"{line}norm ≤ {result['largest_norm']:.3g}  RMS {result['activation']:.3g}  {said}", flush=True)
    print(json.dumps(results) if arguments.json else f"{len(cases) - wrong} of {len(cases)} runs as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
