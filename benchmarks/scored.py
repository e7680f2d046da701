"""What the two scores of the catalogue of bugs share: their options, their cases, where rows go, and the place of a
table in a page."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from at_once import Place, part_of, tried

from tests.verification.bugs.bug import CATALOGUE, Bug

KINDS = ("found", "module", "where", "cause")
LIMIT = 150
"""Seconds until a case counts as stuck."""
PAGE = Path(__file__).parent.parent / "docs" / "prove.md"
Row = dict[str, Any]
Case = tuple[str, str]
"""A bug and a precision."""


def options_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="bugs whose name has one of these in it")
    parser.add_argument("--precision", nargs="*", default=["float64", "bf16", "fp8"])
    parser.add_argument("--jobs", type=int, default=1, help="so many at once, each on its own share of the cores")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of them alone")
    parser.add_argument("--json", type=Path, help="rows are added to this file, one a line, as soon as they are there")
    parser.add_argument("--table", type=Path, nargs="*", help="what --json wrote: its table goes into docs/prove.md")
    return parser


def cases_of(options: argparse.Namespace, takes: Callable[[Bug], bool] = lambda _: True) -> list[Case]:
    named = [name for name, bug in CATALOGUE.items() if takes(bug) and any(part in name for part in options.only)]
    return [(name, each) for name in named for each in CATALOGUE[name].precisions if each in options.precision]


def try_cases(
    cases: Sequence[Any],
    options: argparse.Namespace,
    attempt: Callable[[Place, Any], Row],
    told: Callable[[Row], str],
) -> list[Row]:
    rows = []
    for row in tried(part_of(cases, options.part), options.jobs, attempt):
        rows.append(row)
        print(told(row), flush=True)
        add_row(options.json, row)
    return rows


def add_row(path: Path | None, row: Row) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def rows_of(paths: Iterable[Path]) -> list[Row]:
    """Of a case that was tried again, the last row."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return list({(row["name"], row["precision"]): row for row in rows}.values())


def marks(row: Row) -> str:
    return " ".join(f"{kind}{'+' if row[kind] else '-'}" for kind in KINDS)


def is_named(pattern: str, located: dict[str, Any], kind: str) -> bool:
    return bool(re.search(pattern, str(located.get(kind, ""))))


def count_rows(rows: list[Row], more: str = "", of_these: Callable[[list[Row]], list[str]] = lambda _: []) -> list[str]:
    """A table: how many were found, by precision."""
    lines = [f"| precision | bugs | found | module right | pass right | cause right |{more}"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        these = [row for row in rows if row["precision"] == precision]
        numbers = [str(sum(row[kind] for row in these)) for kind in KINDS]
        lines.append(f"| {' | '.join([precision, str(len(these)), *numbers, *of_these(these)])} |")
    return lines


def rewrite(begin: str, end: str, text: str) -> None:
    """Between two marks of the page."""
    before, _, rest = PAGE.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table; put {begin} and {end} where it belongs")
    PAGE.write_text(f"{before}{begin}\n{text}{end}{after}")
