"""`cuboid train run.toml`: train on this machine, or join the ranks that torchrun or Slurm started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuboid.cli.options import Oversubscribe
from cuboid.errors import UserError, printable, up_to
from cuboid.launch.islands import IslandOptions, with_own_folders
from cuboid.launch.start import NodeOptions, train_run
from cuboid.planning.island_file import plans_islands, with_island
from cuboid.readers import read_json, read_toml
from cuboid.resilience.faults import VARIABLE, parse_faults
from cuboid.resilience.goodput import read_spent
from cuboid.resilience.preemption import REQUEUE
from cuboid.spec.layout import format_weights
from cuboid.spec.partition import partition
from cuboid.spec.run import Run, build_run
from cuboid.spec.training import USUAL
from cuboid.strict_json import json_text
from cuboid.telemetry.communication_ledger import Entry
from cuboid.telemetry.rows import metric_rows
from cuboid.training.communication import Summary, summarize
from cuboid.training.run_folder import BACKEND

if TYPE_CHECKING:
    from cuboid.training.trainer import Outcome


def command(
    file: Annotated[
        Path | None, typer.Argument(help="The run file; default: a tiny model on Python's own source.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Layout in place of the run file's, e.g. dp=2,tp=2,pp=2.")] = None,
    model: Annotated[str | None, typer.Option(help="Model in place of the run file's: a name or a TOML file.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change one field: training.steps=20.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run, also a finished one.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Resume another run's checkpoints in checkpoint.folder as this run's.")
    ] = False,
    count_communication: Annotated[
        bool, typer.Option("--count-communication", help="Count what ranks communicate, beside what is predicted.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace three steps for Perfetto, and what memory holds; see [profile].")
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="nccl, gloo or auto: NCCL on GPUs, also where ranks share one. Short for training.backend."),
    ] = None,
    inject: Annotated[
        str | None, typer.Option(help='Faults to rehearse, e.g. "kill rank=1 step=7; hang rank=0 step=12".')
    ] = None,
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT where nodes meet; HOST is one of them.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the job, each started with this same command.")] = None,
    min_nodes: Annotated[int | None, typer.Option(help="Continue with as few nodes as this, on a new layout.")] = None,
    max_nodes: Annotated[int | None, typer.Option(help="Most nodes that are used.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Default: the layout's ranks / nodes.")] = None,
    group: Annotated[
        str | None, typer.Option(help="Of a plan made with --one-job: the group of the cluster file this node is of.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="Where this node listens: an interface or address; default: towards HOST.")
    ] = None,
    island: Annotated[
        int | None, typer.Option(help="Which island this is, from 0: each is started with its own; see [islands].")
    ] = None,
    islands_rendezvous: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where islands meet; HOST is one of them. Commas between places to fall back to."),
    ] = None,
    oversubscribe: Oversubscribe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object, at the end.")] = False,
) -> None:
    """Train a model on a layout. Ranks of this machine are started here; under torchrun or Slurm this process joins.

    The same command again resumes from the newest whole checkpoint, on any layout. On many nodes it runs on each of
    them, with --nodes and --rendezvous.

    Example: cuboid train examples/demo.toml --layout dp=4,pp=2 --set training.steps=20
    """
    table: dict[str, Any] = dict(read_toml(file)) if file is not None else {"model": "tiny-llama"}
    if island is not None and plans_islands(table) and layout is None:
        table = dict(with_island(table, island))
    if layout is not None:
        table["layout"] = layout
    if model is not None:  # what the run file names lies beside it, what the command line names lies here
        here = Path(model).is_file() or (Path(model) / "config.json").is_file()
        table["model"] = str(Path(model).absolute()) if here else model
    changes = [*(overrides or ()), *(["output.count_communication=true"] if count_communication else ())]
    if backend is not None:
        changes.append(f"training.backend={backend}")
    if profile:  # what is said of it elsewhere counts
        table["profile"] = {"steps": USUAL, **table.get("profile", {})}
    run = build_run(table, changes, folder=file.parent if file is not None else Path())
    _rehearse(run, inject)
    options = NodeOptions(
        rendezvous=rendezvous,
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        ranks_per_node=ranks_per_node,
        interface=interface,
        group=group,
    )

    own = IslandOptions(island=island, rendezvous=islands_rendezvous, interface=interface)
    run_here = with_own_folders(run, own)

    def announce(past: str) -> None:
        if not as_json:
            _announce(run_here)
            if past:
                print(printable(past), flush=True)

    def conclude(outcome: Outcome) -> None:
        if outcome.preempted:
            _say_preempted(run_here, outcome, as_json)
        else:
            _conclude(run_here, as_json)

    if train_run(run, options, overwrite, as_json, conclude, announce, oversubscribe, take_over, own).preempted:
        raise SystemExit(REQUEUE)


def _rehearse(run: Run, inject: str | None) -> None:
    """Ranks find the faults in their environment, however they are started."""
    if inject is not None:
        os.environ[VARIABLE] = inject
    for fault in parse_faults(os.environ.get(VARIABLE, "")):
        if not 0 <= fault.rank < run.layout.world_size:
            works = up_to(run.layout.world_size - 1, "rank=")
            raise UserError(f"fault {fault.kind} rank={fault.rank} is outside {run.layout}; use {works}")


def _say_preempted(run: Run, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        print(json_text({"preempted": True, "saved": outcome.saved, "folder": run.output.folder}))
    elif not outcome.saved:
        print("preempted before there was anything to save; the same command begins anew")
    else:
        print(f"preempted: step {outcome.saved} is saved, in {outcome.seconds:.1f} s; the same command continues there")


def _announce(run: Run) -> None:
    stages = partition(run.model, run.layout.stages, run.training.sequence, run.layout.layers)
    tokens = run.training.global_batch * run.training.sequence
    ramp = f", at first {run.training.batch_ramp}" if run.training.batch_ramp else ""
    ranks = "1 rank" if run.layout.world_size == 1 else f"{run.layout.world_size} ranks"
    print(printable(f"{run.model.name}: {run.model.parameters:,} parameters on {ranks}, {run.layout}"))
    if run.layout.stages > 1:
        print(f"layers per stage: {' '.join(str(len(layers)) for layers in stages)}")
    rows = printable(f"{run.output.folder}/metrics.jsonl")
    print(f"{tokens:,} {run.counts} a step in {_micro_batches(run)}{ramp}; {rows}")


def _micro_batches(run: Run) -> str:
    layout = run.layout
    if layout.has_unequal_counts:
        counts = format_weights(tuple(map(run.micro_batches_of, range(layout.dp))))
        return f"{counts} micro-batches of the replicas"
    if layout.has_unequal_sizes:
        sizes = format_weights(tuple(map(layout.micro_batch_of, range(layout.dp))))
        return f"{run.micro_batches} micro-batches of {sizes} sequences of the replicas"
    return f"{run.micro_batches} micro-batches per replica"


def _conclude(run: Run, as_json: bool) -> None:
    folder = Path(run.output.folder)
    # Where the disk is full the last row may be a part of one.
    rows = metric_rows(folder / "metrics.jsonl")
    if not rows:  # all steps were done, and another folder holds what was said of them
        return
    later = rows[1:] or rows  # the first step also pays for warming up
    seconds = sum(row["seconds"] for row in later)
    summary: dict[str, Any] = {
        "model": run.model.name,
        "layout": str(run.layout),
        "world_size": run.layout.world_size,
        "steps": len(rows),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "tokens_per_second": sum(row["tokens"] for row in later) / seconds if seconds else None,
        "folder": str(folder),
    }
    if (folder / BACKEND).exists():
        told = read_json(folder / BACKEND)
        summary |= {name: told.get(name) for name in ("backend", "gpus", "gpu_shared", "bound")}
    spent = read_spent(folder)
    if spent is not None:
        summary |= {"goodput": round(spent.goodput, 4), "spent": spent.as_row(), "slowest": rows[-1].get("slowest")}
    traces = sorted(str(path) for path in (folder / "profile").glob("*-*")) if run.profile.steps else []
    communicated = summarize(run) if run.output.count_communication else None
    if as_json:
        if communicated is not None:
            summary |= {"communication": communication_rows(communicated), "unforeseen": communicated.unforeseen}
        print(json_text(summary | ({"profile": traces} if traces else {})))
    else:
        if communicated is not None:
            show_communication(communicated)
        first, last = ("not finite" if row["loss"] is None else f"{row['loss']:.4f}" for row in (rows[0], rows[-1]))
        print(f"loss {first} → {last} in {len(rows)} steps")
        if spent is not None:
            print(spent.told())
        if slowest := rows[-1].get("slowest"):
            print(
                f"slowest rank {slowest['rank']}: {slowest['seconds']:.2f} s of its own in a step, the others of its "
                f"stage {slowest['peers']:.2f} s ({printable(slowest['because'])})"
            )
        if traces:
            _show_traces(folder / "profile", traces)


def _show_traces(folder: Path, files: list[str]) -> None:
    ways = {"trace": "ui.perfetto.dev", "snapshot": "pytorch.org/memory_viz", "memory": "any editor (bytes by kind)"}
    for kind, way in ways.items():
        found = [file for file in files if Path(file).name.startswith(f"{kind}-")]
        if found:
            size = sum(Path(file).stat().st_size for file in found) / 1e6
            named = found[0] if len(found) == 1 else f"{folder}/{kind}-* of {len(found)} ranks"
            print(f"{kind}: {printable(named)}, {size:.1f} MB; open it in {way}")


# What ranks communicated in a step, counted and predicted, as a table and as JSON.


def communication_rows(summary: Summary) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "dimension": row.dimension,
            "kind": row.kind,
            "calls": row.counted.calls if row.counted else 0,
            "bytes": row.counted.bytes if row.counted else 0,
            "ring_bytes": row.counted.sent if row.counted else 0.0,
            "predicted_calls": row.predicted.calls if row.predicted else 0,
            "predicted_bytes": row.predicted.bytes if row.predicted else 0,
        }
        for row in summary.rows
    ]


def show_communication(summary: Summary) -> None:
    """The table, and whether every rank communicated what was predicted of it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, title="communicated in a step, by the busiest rank", title_justify="left")
    for name in ("dimension", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "calls", "bytes", "ring sends", "predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary.rows:
        known = row.counted or row.predicted
        sent = f"{row.counted.sent:,.0f}" if row.counted else "0"
        table.add_row(
            Text(printable(row.dimension)),
            Text(printable(row.kind)),
            str(known.ranks if known else 0),
            f"{row.counted.calls if row.counted else 0:,}",
            _bytes(row.counted),
            sent,
            _bytes(row.predicted),
        )
    if summary.rows:
        console.print(table)
    for line in summary.unforeseen[:3]:
        console.print(Text(printable(f"not as predicted: {line}")), style="yellow")
    if summary.ranks and not summary.unforeseen:
        ranks = "1 rank" if summary.ranks == 1 else f"{summary.ranks} ranks"
        console.print(f"counted as predicted, to the byte, on {ranks}")


def _bytes(entry: Entry | None) -> str:
    return f"{entry.bytes if entry else 0:,}"
