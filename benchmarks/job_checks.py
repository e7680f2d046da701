"""Puts each bug of the catalogue into a short training and counts those that the checks of the running job find; says
what the checks cost.

python benchmarks/job_checks.py                                     # all bugs, in every precision they are entered for
python benchmarks/job_checks.py --only norms kv --precision float64
python benchmarks/job_checks.py --part 1/2 --jobs 2 --json job.jsonl   # a row as soon as it is there
python benchmarks/job_checks.py --table job.jsonl                   # writes the table into docs/prove.md; runs nothing
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from at_once import Place, part_of, tried

from cuboid.errors import RankError
from cuboid.training.checks.words import UNKNOWN
from tests.training.checks.jobs import checked
from tests.verification.bugs.bug import CATALOGUE

STEPS = 12
"""Checked are the first two and the tenth: the last is for what shows late."""
LIMIT = 150
Row = dict[str, Any]


def attempt(place: Place, case: tuple[str, str]) -> Row:
    name, precision = case
    bug, begin = CATALOGUE[name], time.perf_counter()
    run = checked(bug.run(precision), STEPS)
    row: Row = {"name": name, "precision": precision, "found": False, "module": False, "where": False, "cause": False}
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
    marks = " ".join(f"{kind}{'+' if row[kind] else '-'}" for kind in ("found", "module", "where", "cause"))
    text = f"\n    step {row['step']}: {row['text']}" if row["found"] else ""
    return f"{row['name']:<38} {row['precision']:<8} {marks} {row['seconds']:5.1f} s{text}{row.get('crashed', '')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="bugs whose name has one of these in it")
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16", "fp8"])
    parser.add_argument("--jobs", type=int, default=1, help="so many at once, each on its own share of the cores")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of them alone")
    parser.add_argument("--json", type=Path, help="rows are added to this file, one a line")
    options = parser.parse_args()
    named = [name for name in CATALOGUE if any(part in name for part in options.only)]
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


if __name__ == "__main__":
    sys.exit(main())
