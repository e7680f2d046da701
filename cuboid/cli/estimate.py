"""`cuboid estimate --rows runs.csv -o answered.csv`: step time and memory of published runs, row by row."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cuboid.cost.published import Answer, answer_rows, read_rows, write_answers
from cuboid.strict_json import json_text


def command(
    rows: Annotated[Path, typer.Option(help="CSV file with the columns of runs.csv.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the same rows with the answers here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the answers.")] = False,
) -> None:
    """Estimate step time and memory of the runs in a CSV file.

    Adds pred_step_s, pred_tok_s_gpu, pred_mem_gb (GiB of the fullest rank), pred_fits and skipped (what a row lacks).

    Example: cuboid estimate --rows runs.csv -o answered.csv
    """
    columns, table = read_rows(rows)
    answers = answer_rows(table)
    for answer in answers:
        if answer.skipped.startswith("line "):
            print(f"{rows}: {answer.skipped}", file=sys.stderr)
    if output is not None:
        write_answers(output, columns, table, answers)
    if as_json:
        print(json_text([_as_json(answer) for answer in answers]))
        return
    skipped = sum(bool(answer.skipped) for answer in answers)
    where = f" -> {output}" if output else ""
    print(f"{len(answers) - skipped} of {len(answers)} rows estimated, {skipped} skipped{where}")


def _as_json(answer: Answer) -> dict[str, object]:
    if answer.skipped:
        return {"skipped": answer.skipped}
    return {
        "pred_step_s": answer.seconds,
        "pred_tok_s_gpu": answer.tokens,
        "pred_mem_gb": answer.memory,
        "pred_fits": answer.fits,
    }
