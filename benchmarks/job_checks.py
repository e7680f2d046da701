"""Puts each bug of the catalogue into a short training and counts those that the checks of the running job find; says
what the checks cost.

python benchmarks/job_checks.py                                     # all bugs, in every precision they are entered for
python benchmarks/job_checks.py --only norms kv --precision float64
python benchmarks/job_checks.py --part 1/2 --jobs 2 --json job.jsonl   # a row as soon as it is there
python benchmarks/job_checks.py --right 6 --seed 0                  # layouts drawn at random, without bugs
python benchmarks/job_checks.py --time dp=2,tp=2,pp=2 --model tiny-llama --set model.hidden=256 --json time.jsonl
python benchmarks/job_checks.py --time dp=1 --shape 1B --set training.device=cuda training.precision=bf16
python benchmarks/job_checks.py --table job.jsonl                   # writes the table into docs/prove.md; runs nothing

--time trains once, with a check every few steps, and holds the time of a period against its steps without one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from at_once import Place, part_of, tried
from h200 import SHAPES, VOCABULARY

from cuboid.errors import RankError, UserError
from cuboid.training.checks.words import UNKNOWN
from cuboid.verification.make import verification_run
from tests.training.checks.jobs import checked
from tests.verification.bugs.bug import CATALOGUE

STEPS = 12
"""Checked are the first two and the tenth: the last is for what shows late."""
LIMIT = 150
KINDS = ("found", "module", "where", "cause")
PAGE = Path(__file__).parent.parent / "docs" / "prove.md"
BEGIN, END = "<!-- written by benchmarks/job_checks.py --table -->", "<!-- end of what it wrote -->"
Row = dict[str, Any]


def attempt(place: Place, case: tuple[str, str]) -> Row:
    name, precision = case
    bug, begin = CATALOGUE[name], time.perf_counter()
    run = checked(bug.run(precision), STEPS)
    row: Row = {"name": name, "precision": precision, **dict.fromkeys(KINDS, False)}
    try:
        ranks = run.layout.world_size
        warnings = place.run("tests.training.checks.jobs:warnings_of", (run, name), ranks, LIMIT)
        if warnings:
            row |= {"found": True, "step": warnings[0]["step"], "text": warnings[0]["text"]}
            located = warnings[0]["located"]
            asked = {"module": bug.module, "where": bug.where, "cause": bug.cause}
            row |= {kind: bool(re.search(pattern, str(located[kind]))) for kind, pattern in asked.items()}
            row["cause"] &= not located["cause"].startswith(UNKNOWN)
    except RankError as error:
        row["crashed"] = str(error)[-1500:]
    return row | {"seconds": round(time.perf_counter() - begin, 1)}


def told(row: Row) -> str:
    marks = " ".join(f"{kind}{'+' if row[kind] else '-'}" for kind in KINDS)
    text = f"\n    step {row['step']}: {row['text']}" if row["found"] else ""
    return f"{row['name']:<38} {row['precision']:<8} {marks} {row['seconds']:5.1f} s{text}{row.get('crashed', '')}"


# Layouts without bugs.

MODELS = ("tiny-llama", "tiny-qwen3", "tiny-gpt2", "tiny-qwen3-moe", "tiny-gpt-oss", "tiny-gemma3", "tiny-deepseek")
LAYOUTS = (
    "dp=2,tp=2,zero=2",
    "dp=2,pp=2,schedule=zb1p",
    "dp=4,zero=1,shard=2",
    "cp=2,tp=2",
    "cp=2,cp_method=ulysses,dp=2,zero=3",
    "tp=4,sequence_parallel=false",
    "tp=2,pp=2,schedule=interleaved,vpp=2",
    "dp=2,recompute=full",
    "pp=2,schedule=zbv,tp=2",
    "dp=2,tp=2,cp=2,zero=3",
)
SETTINGS = (
    (),
    ("optimizer.kind=muon",),
    ("optimizer.average=0.9",),
    ("training.dropout=0.1",),
    ("training.z_loss=1e-3",),
)


def right_case(number: int, seed: int) -> tuple[str, str, str, tuple[str, ...]]:
    source = random.Random(f"{seed}/{number}")
    model, layout = source.choice(MODELS), source.choice(LAYOUTS)
    precision = source.choice(("float64", "float32", "bf16", "fp16"))
    return model, layout, precision, ("model.layers=4", *source.choice(SETTINGS))


def attempt_right(place: Place, case: tuple[str, str, str, tuple[str, ...]]) -> Row:
    model, layout, precision, settings = case
    row: Row = {"model": model, "layout": layout, "precision": precision, "settings": settings, "begin": time.time()}
    try:
        run = checked(verification_run(layout, model, settings, dtype=precision), 6, every=3)
        found = place.run("tests.training.checks.jobs:warnings_of", (run,), run.layout.world_size, LIMIT)
        return row | {"alarms": [warning["text"] for warning in found]}
    except (RankError, UserError) as error:
        return row | {"alarms": [], "refused": str(error)[-1500:]}


# What checks cost.


def cost(options: argparse.Namespace) -> Row:
    """Of one check, in plain steps of the same run."""
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", options.model]
        if options.shape:
            shape = {**SHAPES[options.shape], "family": "llama", "vocab": VOCABULARY, "rope_theta": 500000.0}
            (Path(folder) / "model.toml").write_text("".join(f"{key} = {json.dumps(x)}\n" for key, x in shape.items()))
            model = ["--model", f"{folder}/model.toml"]
        every, steps = options.every, options.every * options.periods + 2 * options.every
        settings = [f"training.steps={steps}", f"checks.every={every}", f"output.folder={folder}/run"]
        settings += [f"training.callbacks=python:{Path(__file__).parent / 'clock.py'}:Clock", *options.set]
        command = [
            sys.executable,
            "-c",
            "from cuboid.cli.main import main; main()",
            "train",
            *model,
            "--layout",
            options.time,
        ]
        command += [word for each in settings for word in ("--set", each)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        ends = json.loads((Path(folder) / "run" / "clock.json").read_text())
        warnings = [line for line in (done.stdout + done.stderr).splitlines() if "check:" in line]
    # Periods end before a checked step: that one, and what it delays, are in the same period.
    seconds = {step: after - before for step, (before, after) in enumerate(pairwise(ends), 2)}
    first = 2 * every
    plain = [seconds[step] for step in seconds if step > first and step % every not in (0, 1)]
    step = statistics.median(plain)
    periods = [sum(seconds[at + each] for each in range(every)) for at in range(first, steps - every + 1, every)]
    check = statistics.median(periods) - every * step
    row = {"layout": options.time, "model": options.shape or options.model, "set": options.set, "step_seconds": step}
    return row | {
        "check_seconds": check,
        "check_in_steps": check / step,
        "at_500": check / step / 500,
        "warnings": warnings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="bugs whose name has one of these in it")
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16", "fp8"])
    parser.add_argument("--jobs", type=int, default=1, help="so many at once, each on its own share of the cores")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of them alone")
    parser.add_argument("--json", type=Path, help="rows are added to this file, one a line")
    parser.add_argument("--table", type=Path, nargs="*", help="what --json wrote: its table goes into docs/prove.md")
    parser.add_argument("--right", type=int, default=0, help="so many layouts without bugs, in place of the bugs")
    parser.add_argument("--seed", type=int, default=0, help="of these layouts")
    parser.add_argument("--time", metavar="LAYOUT", help="what a check costs under this layout, in place of the bugs")
    parser.add_argument("--model", default="tiny-llama", help="with --time: what is trained")
    parser.add_argument(
        "--shape", choices=SHAPES, help="with --time: a model of benchmarks/h200.py in place of --model"
    )
    parser.add_argument("--set", nargs="*", default=[], help="with --time: settings of the run")
    parser.add_argument("--every", type=int, default=5, help="with --time: steps between checks")
    parser.add_argument("--periods", type=int, default=8, help="with --time: how many checks are measured")
    options = parser.parse_args()
    if options.table:
        rewrite([json.loads(line) for path in options.table for line in path.read_text().splitlines()])
        return 0
    if options.time:
        row = cost(options)
        print(json.dumps(row))
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return 0
    if options.right:
        return try_right(options)
    # Those of checkpoints need a second layout, which a training does not have.
    trained = [name for name, bug in CATALOGUE.items() if not bug.onto]
    named = [name for name in trained if any(part in name for part in options.only)]
    wanted = [(name, each) for name in named for each in CATALOGUE[name].precisions if each in options.precision]
    rows: list[Row] = []
    for row in tried(part_of(wanted, options.part), options.jobs, attempt):
        rows.append(row)
        print(told(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        these = [row for row in rows if row["precision"] == precision]
        print(f"{precision}: {sum(row['found'] for row in these)} of {len(these)} found")
    return 0


def try_right(options: argparse.Namespace) -> int:
    cases = [right_case(number, options.seed) for number in range(options.right)]
    alarms = refused = 0
    for row in tried(part_of(cases, options.part), options.jobs, attempt_right):
        alarms, refused = alarms + bool(row["alarms"]), refused + ("refused" in row)
        print(json.dumps(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"{len(cases)} layouts, {refused} of them refused, {alarms} false alarms")
    return int(alarms > 0)


def rewrite(rows: list[Row]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table; put {BEGIN} and {END} where it belongs")
    lines = ["| precision | bugs | found | module right | pass right | cause right |", "|---|---|---|---|---|---|"]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        these = [row for row in rows if row["precision"] == precision]
        numbers = [str(sum(row[kind] for row in these)) for kind in KINDS]
        lines.append(f"| {' | '.join([precision, str(len(these)), *numbers])} |")
    missed = dict[str, list[str]]()
    for row in rows:
        if not row["found"]:
            missed.setdefault(row["name"].replace("-", " "), []).append(row["precision"])
    told = "; ".join(f"{name} ({', '.join(precisions)})" for name, precisions in missed.items()) or "none"
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\nNot found: {told}.\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
