"""Puts each bug of the catalogue back into the engine and asks `verify` for it: the table of `docs/prove.md`.

python benchmarks/bugs.py                                      # all, in every precision they are entered for
python benchmarks/bugs.py --only norms kv --precision float64
python benchmarks/bugs.py --jobs 8 --json bugs.json            # eight at once, each on its share of the cores
python benchmarks/bugs.py --table bugs.json                    # writes what was found into docs/prove.md; runs nothing
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

from at_once import Place, part_of, tried

from cuboid.errors import RankError
from tests.verification.bugs.bug import CATALOGUE
from tests.verification.bugs.catalogue import score, verdict_with

KINDS = ("found", "module", "where", "cause")
LIMIT = 150
"""Seconds until a case counts as stuck."""
PAGE = Path(__file__).parent.parent / "docs" / "prove.md"
BEGIN, END = "<!-- written by benchmarks/bugs.py --table -->", "<!-- until here -->"
Row = dict[str, Any]


def attempt(place: Place, case: tuple[str, str]) -> Row:
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
    marks = " ".join(f"{kind}{'+' if row[kind] else '-'}" for kind in KINDS)
    lines = [f"{row['name']:<32} {row['precision']:<8} {marks} {row['seconds']:5.1f} s"]
    if located := row.get("located"):
        where = f"{located['module']} | {located['tensor']} | {located['where']} step {located['step']}"
        where += f" micro-batch {located['micro_batch']} rank {located['rank']}"
        lines.append(f"    {where} | {located['cause']} | {located['error']:.1e} of {located['allowed']:.1e}")
    return "\n".join([*lines, *([row["crashed"]] if "crashed" in row else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="bugs whose name has one of these in it")
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16", "fp8"])
    parser.add_argument("--jobs", type=int, default=1, help="so many at once, each on its own share of the cores")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of them alone")
    parser.add_argument("--json", type=Path, help="written anew after each case")
    parser.add_argument("--markdown", type=Path, help="the tables of docs/prove.md, into a file")
    parser.add_argument("--table", type=Path, nargs="*", help="what --json wrote: its tables go into docs/prove.md")
    options = parser.parse_args()
    if options.table:
        rewrite(PAGE, [row for path in options.table for row in json.loads(path.read_text())])
        return 0
    named = [name for name in CATALOGUE if any(part in name for part in options.only)]
    wanted = [(name, each) for name in named for each in CATALOGUE[name].precisions if each in options.precision]
    rows: list[Row] = []
    for row in tried(part_of(wanted, options.part), options.jobs, attempt):
        rows.append(row)
        print(told(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    print(summary(rows))
    return 0


def markdown(rows: list[Row]) -> str:
    return f"{counts(rows)}\n{table(rows)}"


def rewrite(page: Path, rows: list[Row]) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no place for the tables; put {BEGIN} and {END} where they belong")
    page.write_text(f"{before}{BEGIN}\n{markdown(rows)}{END}{after}")


def counts(rows: list[Row]) -> str:
    names = {row["name"] for row in rows}
    sources = {CATALOGUE[name].source.split("#")[0] for name in names}
    lines = [f"Of {len(names)} bugs from {len(sources)} public reports:", ""]
    lines += ["| precision | bugs | found | module right | pass right | cause right | slowest verdict |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        these = [row for row in rows if row["precision"] == precision]
        numbers = [str(sum(row[kind] for row in these)) for kind in KINDS]
        slowest = f"{max(row['seconds'] for row in these):.0f} s"
        lines.append(f"| {' | '.join([precision, str(len(these)), *numbers, slowest])} |")
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
        marks = [" ".join(row["precision"] for row in these if row[kind]) or "–" for kind in KINDS]
        shown = f"{bug.layout} -> {bug.onto}" if bug.onto else bug.layout
        cells = [f"{name.replace('-', ' ')}: [{told}]({source})", f"{bug.model}, `{shown}`", *marks]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    lines = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        these = [row for row in rows if row["precision"] == precision]
        told = ", ".join(f"{kind} {sum(row[kind] for row in these)}" for kind in KINDS)
        slowest = max(these, key=lambda row: row["seconds"])
        late = f"slowest {slowest['seconds']:.0f} s ({slowest['name']})"
        lines.append(f"{precision}: {len(these)} bugs, {told}, {late}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
