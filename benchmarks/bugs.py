"""Puts each bug of the catalogue back into the engine and asks `verify` for it: the table of `docs/prove.md`.

python benchmarks/bugs.py                                      # all, in every precision they are entered for
python benchmarks/bugs.py --only norms kv --precision float64
python benchmarks/bugs.py --jobs 8 --json bugs.json            # eight at once, each on its share of the cores
python benchmarks/bugs.py --table bugs.json                    # writes what was found into docs/prove.md; runs nothing
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from at_once import Place
from scored import KINDS, LIMIT, Case, Row, cases_of, count_rows, marks, options_of, rewrite, rows_of, try_cases

from cuboid.errors import RankError
from tests.verification.bugs.bug import CATALOGUE
from tests.verification.bugs.catalogue import score, verdict_with

BEGIN, END = "<!-- written by benchmarks/bugs.py --table -->", "<!-- until here -->"


def attempt(place: Place, case: Case) -> Row:
    name, precision = case
    begin = time.perf_counter()
    row: Row = {"name": name, "precision": precision}
    try:
        verdict = verdict_with(lambda job, given, ranks: place.run(job, given, ranks, LIMIT), name, precision)
        row |= score(name, verdict) | {"located": verdict["located"]}
    except RankError as error:
        row |= dict.fromkeys(KINDS, False) | {"crashed": str(error)[-1500:]}
    return row | {"seconds": time.perf_counter() - begin}


def told(row: Row) -> str:
    lines = [f"{row['name']:<32} {row['precision']:<8} {marks(row)} {row['seconds']:5.1f} s"]
    if located := row.get("located"):
        where = f"{located['module']} | {located['tensor']} | {located['where']} step {located['step']}"
        where += f" micro-batch {located['micro_batch']} rank {located['rank']}"
        lines.append(f"    {where} | {located['cause']} | {located['error']:.1e} of {located['allowed']:.1e}")
    return "\n".join([*lines, *([row["crashed"]] if "crashed" in row else [])])


def main() -> int:
    options = options_of(__doc__).parse_args()
    if options.table:
        rows = rows_of(options.table)
        rewrite(BEGIN, END, f"{counts(rows)}\n{table(rows)}")
        return 0
    rows = try_cases(cases_of(options), options, attempt, told)
    print("\n".join(count_rows(rows, SLOWEST, slowest)))
    return 0


SLOWEST = " slowest verdict |"


def slowest(rows: list[Row]) -> list[str]:
    return [f"{max(row['seconds'] for row in rows):.0f} s"]


def counts(rows: list[Row]) -> str:
    names = {row["name"] for row in rows}
    sources = {CATALOGUE[name].source.split("#")[0] for name in names}
    lines = [f"Of {len(names)} bugs from {len(sources)} public reports:", "", *count_rows(rows, SLOWEST, slowest)]
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> str:
    lines = ["| bug, and where it is public | shows in | found | module | pass | cause |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        bug, these = CATALOGUE[name], [row for row in rows if row["name"] == name]
        source = bug.source.split("#")[0]
        told = (
            source.removeprefix("https://").removeprefix("github.com/").replace("/issues/", "#").replace("/pull/", "#")
        )
        told = "TrainCheck: " + told.rpartition("/")[2] if told.startswith("OrderLab") else told
        right = [" ".join(row["precision"] for row in these if row[kind]) or "–" for kind in KINDS]
        shown = f"{bug.layout} -> {bug.onto}" if bug.onto else bug.layout
        cells = [f"{name.replace('-', ' ')}: [{told}]({source})", f"{bug.model}, `{shown}`", *right]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
