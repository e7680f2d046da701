"""Estimates for a table of published runs: every row answered, or told what it lacks."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuboid.cost.constants import Fabric, chip_named, default_fabric, engine_named, fabric_named
from cuboid.cost.estimate import GIB, Machine, estimate_shapes, wired
from cuboid.cost.inputs import Jobs, Shape
from cuboid.cost.rows import Case, Row, understand
from cuboid.errors import UserError
from cuboid.spec.cluster import accelerator_table, load_cluster

ANSWERS = ("pred_step_s", "pred_tok_s_gpu", "pred_mem_gb", "pred_fits", "skipped")


@dataclass(frozen=True)
class Answer:
    """What the cost model says of one row."""

    seconds: float = 0.0
    tokens: float = 0.0
    memory: float = 0.0
    """GiB."""
    fits: bool = False
    skipped: str = ""
    """What the row lacks; empty where it was estimated."""
    case: Case | None = None


def answer_rows(rows: Sequence[Row | UserError], first_line: int = 2) -> list[Answer]:
    """One answer per row, in order; a row may already be an error of the reader."""
    answers: list[Answer] = []
    for line, row in enumerate(rows, first_line):
        try:
            if isinstance(row, UserError):
                raise row
            answers.append(Answer(case=understand(row)))
        except LookupError as error:
            answers.append(Answer(skipped=f"lacks {error.args[0]}"))
        except UserError as error:
            answers.append(Answer(skipped=f"line {line}: {error}"))
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for index, answer in enumerate(answers):
        if answer.case:
            case = answer.case
            groups.setdefault((case.chip, case.fabric, case.engine, case.precision), []).append(index)
    for members in groups.values():
        cases = [answers[index].case for index in members]
        for index, answer in zip(members, answer_cases([case for case in cases if case]), strict=True):
            answers[index] = answer
    return answers


def stack(cases: Sequence[Case]) -> tuple[Shape, Jobs]:
    """Shapes and jobs of several cases, one entry per case."""
    shape = Shape.make(**{key: [case.shape[key] for case in cases] for key in cases[0].shape})
    return shape, Jobs.make(**{key: [case.job[key] for case in cases] for key in cases[0].job})


def answer_cases(cases: Sequence[Case]) -> list[Answer]:
    """Answers for cases of one accelerator, fabric, engine and precision."""
    first = cases[0]
    machine = Machine(chip_named(first.chip), links_of(first.chip, first.fabric, fabric_named(first.fabric)))
    result = estimate_shapes(*stack(cases), machine, engine_named(first.engine), first.precision)
    columns = np.broadcast_arrays(result.seconds, result.tokens, result.memory / GIB, result.fits)
    return [
        Answer(float(seconds), float(tokens), float(memory), bool(fits), "", case)
        for seconds, tokens, memory, fits, case in zip(*columns, cases, strict=True)
    ]


def links_of(chip: str, name: str, fabric: Fabric) -> Fabric:
    """A named fabric under a chip: as it is where rows say which cluster they ran on, else with the chip's links."""
    if name != default_fabric(chip):
        return fabric
    per_node = accelerator_table(chip)["accelerators_per_node"] or 8
    return wired(fabric, load_cluster(f"{chip}x{per_node * 100_000}"))


def read_rows(path: Path) -> tuple[list[str], list[Row | UserError]]:
    """Columns and rows of a CSV file; a row with more values than columns becomes an error in its place."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or [])
            rows: list[Row | UserError] = []
            for row in reader:
                extra = row.pop(None, None)
                if extra:
                    rows.append(UserError(f"{len(columns) + len(extra)} values for {len(columns)} columns"))
                else:
                    rows.append({key: value or "" for key, value in row.items()})
    except OSError as error:
        raise UserError(f"rows={path} cannot be read: {error.strerror}; name a CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"rows={path} is not a CSV file in UTF-8: {error}") from error
    needed = [name for name in ("gpu", "tp", "pp", "seq") if name not in columns]
    if needed:
        raise UserError(f"rows={path} has no column {', '.join(needed)}; use the columns of runs.csv")
    return columns, rows


def write_answers(path: Path, columns: list[str], rows: Iterable[Row | UserError], answers: Sequence[Answer]) -> None:
    """The rows with their answers, as CSV."""
    kept = [name for name in columns if name not in ANSWERS]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*kept, *ANSWERS])
        for row, answer in zip(rows, answers, strict=True):
            values = ["" if isinstance(row, UserError) else row.get(name, "") for name in kept]
            writer.writerow([*values, *_cells(answer)])


def _cells(answer: Answer) -> list[str]:
    if answer.skipped:
        return ["", "", "", "", answer.skipped]
    fits = "true" if answer.fits else "false"
    return [f"{answer.seconds:.6g}", f"{answer.tokens:.6g}", f"{answer.memory:.4g}", fits, ""]
