"""`cuboid compare RUN RUN…`: losses, speed, memory, and the settings in which runs differ."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cuboid.errors import UserError, printable
from cuboid.report.compare import Comparison, compare
from cuboid.report.source import open_source
from cuboid.strict_json import json_text

ROWS = {
    "ranks": ("ranks", "d"),
    "steps": ("steps", ",d"),
    "tokens": ("tokens", ",d"),
    "last_loss": ("last loss", ".5g"),
    "validation_loss": ("validation loss", ".5g"),
    "step_seconds": ("step, s", ".4g"),
    "predicted_step_seconds": ("step predicted, s", ".4g"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "memory_gib": ("fullest rank, GiB", ".3g"),
    "predicted_memory_gib": ("… predicted, GiB", ".3g"),
    "failures": ("failures", "d"),
}
"""What a run measured -> what it is called, how it is written."""
SHOWN = 8
"""Steps of which losses are shown."""


def command(
    runs: Annotated[list[Path], typer.Argument(help="The folders of two or more runs.", metavar="RUN RUN…")],
    cluster: Annotated[str, typer.Option(help="What to predict for, where runs were not planned: h100x64.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare runs: losses at the same steps, speed, memory, and every setting in which they differ.

    Example: cuboid compare runs/demo runs/other
    """
    if len(runs) < 2:
        raise UserError(f"runs={runs[0]} is one run; name two or more")
    sources = [open_source(run, cluster) for run in runs]
    for path, source in zip(runs, sources, strict=True):
        if source.folder is None:
            raise UserError(f"{path} is a plan, not a run; name the folders of runs")
    found = compare(sources)
    if as_json:
        print(json_text({**asdict(found), "largest_difference": found.largest_difference}))
    else:
        _show(found)


def _show(found: Comparison) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(found.names, [(label, _values(found, key, how)) for key, (label, how) in ROWS.items()]))
    if found.losses:
        every = max(1, len(found.losses) // SHOWN)
        rows = [*found.losses[::every][:SHOWN], *([found.losses[-1]] if every > 1 else [])]
        shown = [(f"step {row['step']}", [format(value, ".5g") for value in row["values"]]) for row in rows]
        console.print(_table(found.names, shown, "loss"))
        console.print(f"largest difference of losses at one step: {found.largest_difference:.3g}")
    else:
        console.print("no step that all of them have done")
    if found.settings:
        shown = [(row["key"], [_setting(value) for value in row["values"]]) for row in found.settings]
        console.print(_table(found.names, shown, "settings that differ"))
    else:
        console.print("the same settings")


def _values(found: Comparison, key: str, how: str) -> list[str]:
    return ["–" if told[key] is None else format(told[key], how) for told in found.measured]


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)


def _table(names: list[str], rows: list[tuple[str, list[str]]], title: str = "") -> Any:
    from rich.table import Table
    from rich.text import Text

    def shown(text: str) -> Text:
        """As it is: what stands in brackets is a part of a name, and no colour."""
        return Text(printable(text))

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left")
    table.add_column(title, style="bold", no_wrap=True)
    for name in names:
        table.add_column(shown(name), justify="right", overflow="fold")
    for label, values in rows:
        if any(value not in ("–", "") for value in values):
            table.add_row(shown(label), *map(shown, values))
    return table
