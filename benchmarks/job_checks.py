"""Puts each bug of the catalogue into a short training and counts those that the checks of the running job find; says
what the checks cost.

python benchmarks/job_checks.py                                     # all bugs, in every precision they are entered for
python benchmarks/job_checks.py --only norms kv --precision float64
python benchmarks/job_checks.py --part 1/2 --jobs 2 --json job.jsonl   # a row as soon as it is there
python benchmarks/job_checks.py --right 6 --seed 0                  # layouts drawn at random, without bugs
python benchmarks/job_checks.py --time dp=2,tp=2,pp=2 --model tiny-llama --set model.hidden=256 --json time.jsonl
python benchmarks/job_checks.py --time dp=1 --shape 1B --beside --set training.device=cuda training.precision=bf16
python benchmarks/job_checks.py --table job.jsonl                   # writes the table into docs/prove.md; runs nothing

Bugs are looked for in one round of fifty steps, and --time takes the time of whole rounds of fifty: the same settings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from at_once import Place
from false_alarms import MODELS, drawn
from h200 import SHAPES, VOCABULARY
from scored import (
    KINDS,
    LIMIT,
    Case,
    Row,
    add_row,
    cases_of,
    count_rows,
    is_named,
    marks,
    options_of,
    rewrite,
    rows_of,
    try_cases,
)

from cuboid.errors import RankError, UserError
from cuboid.spec.run import Run
from cuboid.telemetry.rows import metric_rows
from cuboid.training.checks.hypotheses import UNKNOWN
from cuboid.training.checks.sampling import ROUND
from cuboid.verification.make import verification_run
from tests.training.checks.jobs import checked
from tests.verification.bugs.bug import CATALOGUE

DEVICE = {"device": "cpu", "backend": "auto"}
"""As --device and --backend say."""
EVERY = 50
"""Steps of a round, both where bugs are looked for and where the time is taken."""
BEGIN, END = "<!-- written by benchmarks/job_checks.py --table -->", "<!-- end of what it wrote -->"


def attempt(place: Place, case: Case) -> Row:
    name, precision = case
    bug, begin = CATALOGUE[name], time.perf_counter()
    # A round in the middle of a run: no step is checked because the run has just begun. Of tiny models checks take
    # more than a hundredth of the time, for which longer rounds would make up.
    run = placed(checked(bug.run(precision), EVERY, every=EVERY, first=0, share=1.0))
    row: Row = {"name": name, "precision": precision, **dict.fromkeys(KINDS, False)}
    try:
        warnings = warned(place, "first_warning_of", run, name)
        if warnings:
            row |= {"found": True, "step": warnings[0]["step"], "text": warnings[0]["text"]}
            located = warnings[0]["located"]
            asked = {"module": bug.module, "where": bug.where, "cause": bug.cause}
            row |= {kind: is_named(pattern, located, kind) for kind, pattern in asked.items()}
            row["cause"] &= not located["cause"].startswith(UNKNOWN)
    except RankError as error:
        row["crashed"] = str(error)[-1500:]
    return row | {"seconds": round(time.perf_counter() - begin, 1)}


def placed(run: Run) -> Run:
    return replace(run, training=replace(run.training, device=DEVICE["device"], backend=DEVICE["backend"]))


def warned(place: Place, job: str, run: Run, *more: str) -> list[dict[str, Any]]:
    arguments = (f"tests.training.checks.jobs:{job}", (run, *more), run.layout.world_size, LIMIT)
    found: list[dict[str, Any]] = place.run(*arguments, **DEVICE)
    return found


def told(row: Row) -> str:
    text = f"\n    step {row['step']}: {row['text']}" if row["found"] else ""
    return f"{row['name']:<38} {row['precision']:<8} {marks(row)} {row['seconds']:5.1f} s{text}{row.get('crashed', '')}"


# Layouts without bugs.

PRECISIONS = ("float64", "bf16", "float32", "fp16")


def attempt_right(place: Place, run: Run) -> Row:
    row: Row = {"model": run.model.name, "layout": str(run.layout), "precision": run.training.precision}
    run = placed(checked(run, 14, every=6, share=1.0))
    try:
        return row | {"alarms": [warning["text"] for warning in warned(place, "warnings_of", run)]}
    except (RankError, UserError) as error:
        return row | {"alarms": [], "refused": str(error)[-1500:]}


# What checks cost.


def cost(options: argparse.Namespace) -> Row:
    """Of whole rounds, in plain steps of the same run; and of steps of a run without checks, which may have CUDA
    graphs, beside the plain ones. By the wall clock; by the CPU time of all ranks; and what of that they spent in
    checks, which other work on the machine hardly changes."""
    ends, warnings, losses = train(options, EVERY, EVERY + options.rounds * EVERY)
    row = {"layout": options.time, "model": options.shape or options.model, "set": options.set, "warnings": warnings}
    row |= in_rounds(ends["wall"]) | {"cpu": in_rounds(ends["cpu"])}
    spent, whole = (ends[kind][-1] - ends[kind][EVERY - 1] for kind in ("checks", "cpu"))
    row |= {"cpu_seconds_of_checks": spent, "share_of_cpu": spent / (whole - spent)}
    if options.beside:
        ends, _, same = train(options, 0, 40)
        without = statistics.median(after - before for before, after in pairwise(ends["wall"][15:]))
        row |= {"loss_40": losses[39], "loss_40_without": same[39]}
        row |= {"step_seconds_without": without, "longer": row["step_seconds"] * (1 + row["share"]) / without - 1}
    return row


def in_rounds(ends: list[float]) -> Row:
    seconds = {step: after - before for step, (before, after) in enumerate(pairwise(ends), 2)}
    # The first round includes the start. A sampled step makes the next one longer, or shorter if it waited for the
    # device.
    rounds = range(EVERY, len(ends), EVERY)
    sampled = [(2 * place + 1) * EVERY // (2 * len(ROUND)) + 1 for place in range(len(ROUND))]
    checked = {at + step + after for at in rounds for step in sampled for after in (0, 1)}
    plain = statistics.median(seconds[step] for step in seconds if step > EVERY and step not in checked)
    pairs = [[seconds[at + step] + seconds[at + step + 1] - 2 * plain for at in rounds] for step in sampled]
    checks = sum(map(statistics.median, pairs)) / plain
    found: Row = {"step_seconds": plain, "sampled_in_steps": [round(statistics.median(x) / plain, 4) for x in pairs]}
    return found | {"round_in_steps": checks, "share": checks / EVERY}


def train(options: argparse.Namespace, every: int, steps: int) -> tuple[dict[str, list[float]], list[str], list[float]]:
    """When each step ended, what was warned of, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", options.model]
        if options.shape:
            shape = {**SHAPES[options.shape], "family": "llama", "vocab": VOCABULARY, "rope_theta": 500000.0}
            (Path(folder) / "model.toml").write_text("".join(f"{key} = {json.dumps(x)}\n" for key, x in shape.items()))
            model = ["--model", f"{folder}/model.toml"]
        settings = [f"training.steps={steps}", f"checks.every={every}", "checks.share=1", f"output.folder={folder}/run"]
        settings += ["learning_rate.schedule=constant"]  # so that runs of other lengths are the same
        settings += [f"training.callbacks=python:{Path(__file__).parent / 'clock.py'}:Clock", *options.set]
        start = [sys.executable, "-c", "from cuboid.cli.main import main; main()", "train"]
        command = [*start, *model, "--layout", options.time, *(word for each in settings for word in ("--set", each))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        ranks = [json.loads(path.read_text()) for path in Path(folder, "run").glob("clock-*.json")]
        wall, cpu, checks = ([sum(end[kind] for end in at) for at in zip(*ranks, strict=True)] for kind in range(3))
        ends = {"wall": [each / len(ranks) for each in wall], "cpu": cpu, "checks": checks}
        warnings = [line for line in (done.stdout + done.stderr).splitlines() if "check:" in line]
        return ends, warnings, [row["loss"] for row in metric_rows(Path(folder) / "run" / "metrics.jsonl")]


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--right", type=int, default=0, help="so many layouts without bugs, in place of the bugs")
    parser.add_argument("--layouts", nargs="*", default=[], help="the same of these; model:layout where not tiny-llama")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of bugs and layouts")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of these layouts")
    parser.add_argument("--time", metavar="LAYOUT", help="what checks cost under this layout, in place of the bugs")
    parser.add_argument("--model", default="tiny-llama", help="with --time: what is trained")
    parser.add_argument(
        "--shape", choices=SHAPES, help="with --time: a model of benchmarks/h200.py in place of --model"
    )
    parser.add_argument("--set", nargs="*", default=[], help="with --time, --layouts: settings of the run")
    parser.add_argument("--rounds", type=int, default=3, help="with --time: how many are measured")
    parser.add_argument("--beside", action="store_true", help="with --time: also a run without checks")
    options = parser.parse_args()
    DEVICE.update(device=options.device, backend=options.backend)
    if options.table:
        rewrite(BEGIN, END, table(rows_of(options.table)))
        return 0
    if options.time:
        row = cost(options)
        print(json.dumps(row))
        add_row(options.json, row)
        return 0
    if options.right or options.layouts:
        numbers = random.Random(options.seed)
        # Models in turn, and precisions once all models had theirs.
        kinds = [
            (MODELS[at % len(MODELS)], PRECISIONS[at // len(MODELS) % len(PRECISIONS)]) for at in range(options.right)
        ]
        cases = [drawn(numbers, model, precision) for model, precision in kinds]
        for layout in options.layouts:
            first, _, after = layout.partition(":")
            model, rest = ("", layout) if "=" in first else (first, after)
            for each in options.precision:
                cases.append(verification_run(rest, model or "tiny-llama", tuple(options.set), dtype=each))
        found = try_cases(cases, options, attempt_right, json.dumps)
        alarms, refused = (sum(bool(row.get(name)) for row in found) for name in ("alarms", "refused"))
        print(f"{len(found)} layouts, {refused} of them refused, {alarms} false alarms")
        return int(alarms > 0)
    # Those of checkpoints need a second layout, which a training does not have.
    rows = try_cases(cases_of(options, lambda bug: not bug.onto), options, attempt, told)
    print(table(rows))
    return 0


def table(rows: list[Row]) -> str:
    missed = dict[str, list[str]]()
    for row in rows:
        if not row["found"]:
            missed.setdefault(row["name"].replace("-", " "), []).append(row["precision"])
    told = "; ".join(f"{name} ({', '.join(precisions)})" for name, precisions in missed.items()) or "none"
    return "\n".join([*count_rows(rows), "", f"Not found: {told}.", ""])


if __name__ == "__main__":
    sys.exit(main())
