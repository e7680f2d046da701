"""What a probe found, for a terminal."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cuboid.probe.expected import Expected
from cuboid.probe.samples import Sample
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.run import Run

MIB = 2**20


def show(cluster: ClusterSpec, samples: Sequence[Sample], output: Path | None) -> None:
    """Every sample with its rate and range, then what the planner will take from them."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("what", "size", "ranks", "ms", "from", "to", "rate"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=name != "what")
    for sample in samples:
        if sample.kind == "share":
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
        if sample.kind == "share" and cluster.accelerator == "cpu":
            low, mean, high = min(sample.windows), statistics.fmean(sample.windows), max(sample.windows)
            console.print(f"a rank {sample.way} had {mean:.0%} of a core ({low:.0%} to {high:.0%})")
    console.print(f"while all compute a rank has {chip['together']:.0%} of the speed it has alone")
    if output is not None:
        console.print(
            f"profile: {output}; use it in place of a cluster's name: cuboid plan MODEL {output} …", soft_wrap=True
        )


def _rate(sample: Sample) -> str:
    if sample.kind == "product":
        rows, inner, columns = sample.size
        return f"{6 * rows * inner * columns / sample.seconds / 1e9:,.1f} GFLOP/s"
    if sample.kind in ("gradients", "update") or sample.kind.startswith("attention"):
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
