"""Puts each bug of the catalogue back into the engine and asks `verify` for it: the table of `docs/prove.md`.

python benchmarks/bugs.py                             # all, in float64 and bf16
python benchmarks/bugs.py --only norms kv --precision float64
python benchmarks/bugs.py --json bugs.json --markdown bugs.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from cuboid.errors import RankError
from cuboid.launch.pool import Pool
from tests.verification.bugs.bug import CATALOGUE
from tests.verification.bugs.catalogue import score


def tried(pool: Pool, name: str, precision: str) -> dict[str, Any]:
    run = CATALOGUE[name].run(precision)
    begin = time.perf_counter()
    row: dict[str, Any] = {"name": name, "precision": precision}
    try:
        job = "tests.verification.bugs.catalogue:verify_with"
        verdict = pool.run(job, (name, precision), ranks=run.layout.world_size, timeout=300)[0]
        row |= score(name, verdict) | {"located": verdict["located"]}
    except RankError as error:
        row |= {"found": True, "module": False, "where": False, "cause": False, "crashed": str(error)[-1500:]}
    return row | {"seconds": time.perf_counter() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="bugs whose name has one of these in it")
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = []
    with Pool() as pool:
        for name, bug in CATALOGUE.items():
            if not any(part in name for part in options.only):
                continue
            for precision in options.precision:
                if precision not in bug.precisions:
                    continue
                row = tried(pool, name, precision)
                rows.append(row)
                marks = " ".join(f"{kind}{'+' if row[kind] else '-'}" for kind in ("found", "module", "where", "cause"))
                print(f"{name:<32} {precision:<8} {marks} {row['seconds']:5.1f} s", flush=True)
                located = row.get("located")
                if located:
                    where = f"{located['module']} | {located['tensor']} | {located['where']} step {located['step']}"
                    where += f" micro-batch {located['micro_batch']} rank {located['rank']}"
                    print(f"    {where} | {located['cause']} | {located['error']:.1e} of {located['allowed']:.1e}")
                if "crashed" in row:
                    print(row["crashed"])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    print(summary(rows))
    return 0


KINDS = ("found", "module", "where", "cause")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/prove.md."""
    lines = ["| bug, and where it is public | shows in | found | module | pass | cause |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        bug, these = CATALOGUE[name], [row for row in rows if row["name"] == name]
        source = bug.source.split("#")[0]
        told = (
            source.removeprefix("https://").removeprefix("github.com/").replace("/issues/", "#").replace("/pull/", "#")
        )
        told = "TrainCheck: " + told.rpartition("/")[2] if told.startswith("OrderLab") else told
        marks = [" ".join(row["precision"] for row in these if row[kind]) or "–" for kind in KINDS]
        cells = [f"{name.replace('-', ' ')}: [{told}]({source})", f"{bug.model}, `{bug.layout}`", *marks]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        these = [row for row in rows if row["precision"] == precision]
        told = ", ".join(f"{kind} {sum(row[kind] for row in these)}" for kind in ("found", "module", "where", "cause"))
        slowest = max(row["seconds"] for row in these)
        lines.append(f"{precision}: {len(these)} bugs, {told}, slowest {slowest:.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
