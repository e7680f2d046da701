"""`cuboid report RUN|plan.toml -o report.html`: one page about a run or a plan, predicted beside measured."""

from pathlib import Path
from typing import Annotated

import typer

from cuboid.errors import UserError
from cuboid.outputs import write_output
from cuboid.report.page import collect, page, serve
from cuboid.report.source import Source, open_source
from cuboid.report.timeline import merged_trace
from cuboid.strict_json import json_text


def command(
    source: Annotated[Path, typer.Argument(help="The folder of a run, or a plan file.", metavar="RUN|PLAN")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
    cluster: Annotated[str, typer.Option(help="What to predict for, where the run was not planned: h100x64.")] = "",
    probe: Annotated[
        bool, typer.Option("--probe", help="First run a few steps here, and predict from how long they take.")
    ] = False,
    search: Annotated[bool, typer.Option(help="Also look at the other layouts there were to choose from.")] = True,
    trace: Annotated[
        Path | None, typer.Option(help="Also write measured and simulated steps for Perfetto or chrome://tracing.")
    ] = None,
    as_served: Annotated[
        bool, typer.Option("--serve", help="Serve the page, renewed while the run is running.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where to listen, for --serve.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --serve; 0: any that is free.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page shows as one JSON object.")] = False,
) -> None:
    """Write one page about a run or a plan: timeline, memory, traffic, curves, failures; predicted beside measured.

    The page needs no network and opens from the disk.

    Example: cuboid report runs/demo -o report.html
    """
    if as_served:
        serve(source, host, port, cluster, search, ready=lambda address: print(f"{address} (Ctrl-C ends)", flush=True))
    opened = open_source(source, cluster)
    if probe:
        opened = _probed(opened, source)
    if trace is not None:
        write_output(trace, json_text(merged_trace(opened)))
    data = collect(opened, search)
    if as_json:
        print(json_text(data))
        return
    text = page(data)
    write_output(output, text)
    print(f"{output}: {len(text.encode()) / 1e6:.2f} MB, open it in a browser")
    if trace is not None:
        print(f"{trace}: open it at ui.perfetto.dev or chrome://tracing")


def _probed(opened: Source, path: Path) -> Source:
    """The same with its machine measured."""
    if opened.folder is None or opened.cluster_name:
        given = f"cluster={opened.cluster_name}" if opened.cluster_name else f"{path} is a plan"
        raise UserError(f"probe=true measures this machine for a run that was trained, and {given}; omit one of them")
    from cuboid.probe.rehearsal import rehearse  # here, because it brings what starts ranks

    rehearse(opened.run, opened.folder)
    return open_source(path)
