"""`cuboid probe -o cluster.toml`: measure this machine or these hosts for the planner; or run one rank of any job."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from cuboid.cli.options import Oversubscribe, given_options
from cuboid.errors import UserError
from cuboid.outputs import check_output, write_output
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.run import Run, build_run
from cuboid.strict_json import json_text

if TYPE_CHECKING:
    from cuboid.probe.expected import Expected
    from cuboid.probe.samples import Sample

OF_A_MEASUREMENT = ("output", "ranks", "seconds", "nodes", "rendezvous", "interface", "backend", "oversubscribe")
OF_A_JOB = ("layout", "model", "sequence", "micro_batch", "global_batch", "precision", "cluster")
DAY = 86400.0


def command(
    context: typer.Context,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile, for plan to use.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this host; default: its GPUs, or its cores where it has none.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=DAY, help="How long to measure, about.")] = 60.0,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts that take part; run this on each.")] = 1,
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT of the host that leads and writes.")] = None,
    interface: Annotated[str | None, typer.Option(help="The network interface; default: the one to HOST.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[
        Literal["auto", "nccl", "gloo"], typer.Option(help="What carries collectives; auto: NCCL on GPUs.")
    ] = "auto",
    rank: Annotated[int | None, typer.Option(min=0, help="Run this one rank of a job, without the others.")] = None,
    layout: Annotated[str | None, typer.Option(help="Of the job, for --rank: dp=2,tp=2,pp=2.")] = None,
    model: Annotated[str | None, typer.Option(help="Of the job: a catalog name, a TOML file or a config.json.")] = None,
    sequence: Annotated[int, typer.Option("--seq", "--sequence", min=1, help="Of the job: tokens per sequence.")] = 256,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Of the job: sequences per micro-batch.")] = None,
    global_batch: Annotated[int, typer.Option(min=1, max=1 << 16, help="Of the job: sequences per step.")] = 16,
    precision: Annotated[str | None, typer.Option(help="Of the job; default: float32 on CPUs, bf16 on GPUs.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Of the job, for the prediction: a profile or a name such as h100x8.")
    ] = None,
    oversubscribe: Oversubscribe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure matmuls, attention, memory and collectives with all ranks busy, and write a profile for the planner.

    Example: cuboid probe -o here.toml; cuboid plan tiny-llama here.toml --global-batch 16 --seq 256 --precision float32

    With --rank, run one rank of a job of any size here, and show its memory and time beside what is predicted.

    Example: cuboid probe --rank 5 --layout dp=2,tp=2,pp=2 --model tiny-llama
    """
    for option, value in given_options(context).items():
        if rank is None and option in OF_A_JOB:
            raise UserError(f"{option}={value} is of a job, of which one rank is run; add --rank 0")
        if rank is not None and option in OF_A_MEASUREMENT:
            raise UserError(f"{option}={value} is for measuring this machine, not rank={rank} of a job; omit one")
    if rank is not None:
        if layout is None or model is None:
            raise UserError(f"rank={rank} needs a job; add --layout dp=2,tp=2,pp=2 --model tiny-llama")
        wanted = layout if micro_batch is None else f"{layout},micro_batch={micro_batch}"
        kind = _device_type(device)
        training = {
            "global_batch": global_batch,
            "sequence": sequence,
            "precision": precision or ("bf16" if kind == "cuda" else "float32"),
            "device": device,
        }
        table = {"model": model, "layout": wanted, "training": training, "data": {"source": "synthetic"}}
        _one_rank(build_run(table), rank, cluster, kind, as_json)
        return
    _probe(output, ranks, seconds, nodes, rendezvous, interface, device, backend, as_json, oversubscribe)


def _device_type(device: str) -> str:
    from cuboid.parallel.device import choose_device

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={device} is unknown; use auto, cpu or cuda")
    return choose_device(device, 0, "--device").type


def _probe(
    output: Path | None,
    ranks: int | None,
    seconds: float,
    nodes: int,
    rendezvous: str | None,
    interface: str | None,
    device: str,
    backend: Literal["auto", "nccl", "gloo"],
    as_json: bool,
    oversubscribe: bool,
) -> None:
    from cuboid.launch.capacity import check_ranks
    from cuboid.launch.network import parse_endpoint
    from cuboid.probe.hosts import Meeting, check_interface, interface_to, is_here, run_probe

    meeting = None
    if nodes > 1:
        if rendezvous is None:
            raise UserError(f"nodes={nodes} need a place to meet; add --rendezvous HOST:PORT, the same on every host")
        where = parse_endpoint(rendezvous)
        if interface is not None:
            check_interface(interface)
        meeting = Meeting(nodes, where.host, where.port, interface or interface_to(where.host, where.port))
    for name, value in (("rendezvous", rendezvous), ("interface", interface)):
        if nodes == 1 and value is not None:
            raise UserError(f"{name}={value} is for several hosts; add --nodes 2 or omit it")
    if output is not None:
        if output.suffix != ".toml":
            raise UserError(f"output={output} is no TOML file; name it like cluster.toml, for plan to know it")
        if meeting is None or is_here(meeting.host):  # which writes it
            check_output(output)
    kind = _device_type(device)
    if backend == "nccl" and kind != "cuda":
        raise UserError("backend=nccl needs a GPU for every rank, and this host has none; use --backend auto or gloo")
    count = ranks or _default_ranks(kind)
    check_ranks(count, f"ranks={count}", oversubscribe=oversubscribe)

    def tell(text: str) -> None:
        print(f"probe: {text}", file=sys.stderr, flush=True)

    probed = run_probe(count, seconds, device, meeting, tell, backend)
    samples = probed.samples
    if samples is None:
        tell("done; the leading host has the profile")
        return
    from cuboid.probe.profile import dump_profile, make_cluster, profile_table
    from cuboid.probe.session import facts

    here = facts(device)
    sizes = {"memory": here.memory, "host_memory": here.host_memory}
    found = make_cluster(samples, device=here.name, **sizes, local=count, nodes=nodes)
    if output is not None:
        import torch

        carried = str(probed.joined.get("backend") or "none")
        about = {"device": here.name, "torch": str(torch.__version__), "seconds": seconds, "backend": carried}
        write_output(output, dump_profile(found, samples, about))
    if as_json:
        rows = [sample.row() for sample in samples]
        carried_by = {name: probed.joined.get(name) for name in ("backend", "gpus", "gpu_shared")}
        print(json_text({"cluster": profile_table(found), "samples": rows, **carried_by}))
        return

    show(found, samples, output)


def _default_ranks(kind: str) -> int:
    if kind == "cuda":
        import torch

        return torch.cuda.device_count()
    return os.cpu_count() or 1


def _one_rank(run: Run, rank: int, cluster: str | None, kind: str, as_json: bool) -> None:
    from psutil import virtual_memory

    from cuboid.cost.constants import engine_named
    from cuboid.probe.expected import expected
    from cuboid.probe.one_rank import check_one_rank, run_one_rank
    from cuboid.spec.run import check_supported

    check_supported(run)
    check_one_rank(run, rank)
    place = load_cluster(cluster or ("cpux8" if kind == "cpu" else _accelerator_here()))
    world = run.layout.world_size
    # A profile says what an accelerator of this machine does, for jobs that this machine is too small for.
    if cluster is not None and not place.measured and place.accelerators < world:
        raise UserError(
            f"cluster={cluster} has {place.accelerators} of the {world} accelerators that layout={run.layout} needs; "
            "name one with all of them, or a profile of any size"
        )
    expected(run, rank, place)  # what cannot be predicted is refused before anything runs
    here = expected(run, rank, load_cluster("cpux8"))
    # A model that does not fit is told so as it is made.
    if kind == "cpu" and here.seconds > MOST_SECONDS and here.memory["parameters"] < virtual_memory().available:
        raise UserError(
            f"global_batch={run.training.global_batch} with sequence={run.training.sequence} takes a rank on a CPU "
            f"about {here.seconds / 3600:,.1f} hours a step; use a smaller batch, a shorter sequence or --device cuda"
        )
    report = run_one_rank(run, rank)
    told = expected(run, rank, place, report.routing)
    if as_json:
        found = {"memory": report.memory, "seconds": min(report.seconds), "every_step": report.seconds}
        found["routing"] = report.routing
        print(json_text({"rank": rank, "layout": str(run.layout), "measured": found, "predicted": vars(told)}))
        return

    show_rank(run, rank, report.memory, report.seconds, told)
    if report.routing is not None:
        usual = report.routing / engine_named("cuboid").host_routing
        typer.echo(f"the host launches in {usual:.2f} of the time that plans assume; the prediction is at that speed")


def _accelerator_here() -> str:
    from cuboid.probe.profile import catalog_name
    from cuboid.probe.session import facts

    return f"{catalog_name(facts('cuda').name)}x8"


MIB = 2**20
MOST_SECONDS = 600.0
"""Of a step on a CPU, as predicted: whoever asks for more has mistyped it."""


def show(cluster: ClusterSpec, samples: Sequence[Sample], output: Path | None) -> None:
    """Every sample with its rate and range, then what the planner will take from them."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("what", "size", "ranks", "ms", "from", "to", "rate"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=name != "what")
    for sample in samples:
        if sample.kind == "core_fraction":
            continue
        times = [f"{1e3 * value:.3g}" for value in (sample.seconds, min(sample.windows), max(sample.windows))]
        name = f"{sample.kind.replace('_', ' ')} {sample.precision}".strip()
        name += "" if sample.way == "together" else f", {sample.way}"
        where = f"{sample.ranks}" + (f" / {sample.nodes} hosts" if sample.nodes > 1 else "")
        table.add_row(name, "×".join(map(str, sample.size)), where, *times, _rate(sample))
    console.print(table)
    console.print(
        f"\n{cluster.nodes} host(s) with {cluster.accelerators_per_node} rank(s) of {cluster.accelerator} each"
    )
    for tier in cluster.tiers:
        if tier.size > 1:
            console.print(f"{tier.name}: {tier.bandwidth:.4g} GB/s and {tier.latency:.4g} µs a step, per rank")
    if cluster.accelerators == 1:
        console.print("links: one rank has none to measure, and plans take the catalog's")
    chip = cluster.measured["chip"]
    for sample in samples:
        if sample.kind == "core_fraction" and cluster.accelerator == "cpu":
            low, mean, high = min(sample.windows), statistics.fmean(sample.windows), max(sample.windows)
            console.print(f"a rank {sample.way} had {mean:.0%} of a core ({low:.0%} to {high:.0%})")
    console.print(f"while all compute a rank has {chip['together']:.0%} of the speed it has alone")
    if output is not None:
        console.print(
            f"profile: {output}; use it in place of a cluster's name: cuboid plan MODEL {output} …", soft_wrap=True
        )


def _rate(sample: Sample) -> str:
    if sample.kind == "matmul":
        rows, inner, columns = sample.size
        return f"{6 * rows * inner * columns / sample.seconds / 1e9:,.1f} GFLOP/s"
    if sample.kind in ("gradients", "update", "routing") or sample.kind.startswith("attention"):
        return ""
    return f"{(2 if sample.kind == 'memory' else 1) * sample.size[0] / sample.seconds / 1e9:.3g} GB/s"


def show_rank(run: Run, rank: int, memory: dict[str, float], seconds: Sequence[float], told: Expected) -> None:
    """Measured beside predicted."""
    console = Console(highlight=False)
    console.print(f"rank {rank} of {run.layout}, {run.model.name}, {run.micro_batches} micro-batches", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    same = told.precision == run.training.precision
    for name in ("", "measured", "predicted" if same else f"predicted in {told.precision}"):
        table.add_column(name, justify="right" if name else "left")
    for kind, size in memory.items():
        table.add_row(kind, f"{size / MIB:,.1f} MiB", f"{told.memory[kind] / MIB:,.1f} MiB")
    total, predicted = sum(memory.values()), sum(told.memory.values())
    table.add_row("in all, at the peak", f"{total / MIB:,.1f} MiB", f"{predicted / MIB:,.1f} MiB")
    median = statistics.median(seconds)
    table.add_row("computing of a step", f"{median:.4g} s", f"{told.seconds:.4g} s")
    console.print(table)
    console.print(f"{len(seconds)} steps of {min(seconds):.4g} to {max(seconds):.4g} s; collectives answered at once")
