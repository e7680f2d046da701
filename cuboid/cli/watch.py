"""`cuboid watch RUN`: a run in the terminal while it runs; plain lines where the output is no terminal."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cuboid.errors import printable
from cuboid.report.watch import Watched
from cuboid.strict_json import json_text


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    cluster: Annotated[str, typer.Option(help="What to compare with, where the run was not planned: h100x64.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print one JSON object.")] = False,
) -> None:
    """Watch a run: progress, speed, loss, what its pipeline does, memory. Ends when the run does.

    Example: cuboid watch runs/demo
    """
    watched = Watched.open(run, cluster)
    watched.refresh()
    if as_json:
        print(json_text(watched.state()))
    elif sys.stdout.isatty() and not once:
        _follow(watched, every)
    else:
        _print_lines(watched, every, once)


def _print_lines(watched: Watched, every: float, once: bool) -> None:
    from cuboid.report.watch import line

    said, warned = None, 0
    while True:
        state = watched.state()
        for warning in state["warnings"][warned:]:
            print(printable(f"warning: {warning}"), flush=True)
        warned = len(state["warnings"])
        if (state["step"], state["status"]) != said:
            print(printable(line(state)), flush=True)
        said = state["step"], state["status"]
        if once or state["status"] != "running":
            return
        time.sleep(every)
        watched.refresh()


def _follow(watched: Watched, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from cuboid.report.watch import frame

    console = Console()

    def look() -> object:
        return frame(watched, console.width, console.height)

    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(look(), refresh=True)  # type: ignore[arg-type]
            if watched.state()["status"] != "running":
                return
            time.sleep(every)
            watched.refresh()
