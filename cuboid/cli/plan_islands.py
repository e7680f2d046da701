"""What `cuboid plan` and `cuboid explain` say of a plan of islands, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from cuboid.planning.island_file import start_lines
from cuboid.planning.islands import IslandsPlan, Other
from cuboid.planning.plan import GIB, amount
from cuboid.spec.coding import encode

if TYPE_CHECKING:
    from rich.console import Console


def as_json(plan: IslandsPlan) -> dict[str, object]:
    """One object for all islands."""
    from cuboid.cli.plan import as_row

    return {
        "model": plan.plans[0].question.model.name,
        "groups": plan.groups.name,
        "islands": [
            {"name": name, "host_gib_per_node": held / GIB, "sent_bytes": sent, "times": encode(times)} | as_row(own)
            for name, own, held, sent, times in zip(
                plan.names, plan.plans, plan.host_bytes, plan.sent, plan.times, strict=True
            )
        ],
        "settings": encode(plan.spec),
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "computing": plan.computing,
        "hidden": plan.hidden,
        "transfer_seconds": list(plan.transfers),
        "coordinator": plan.coordinator,
        "expected_loss": {**asdict(plan.loss), "sentence": plan.loss.sentence},
        "alone": encode(plan.alone) if plan.alone else None,
        "one_job": encode(plan.one_job) if plan.one_job else None,
        "one_job_refused": plan.one_job_refused,
        "notes": list(plan.notes),
        "omitted": plan.groups.omitted(),
    }


def show(console: Console, plan: IslandsPlan, written: str = "", tokens: float | None = None) -> None:
    """The islands, how they synchronise, what that costs, and what else could be done."""
    from rich.table import Table

    question, spec = plan.plans[0].question, plan.spec
    console.print(
        f"{question.model.name} ({amount(question.model.parameters)} parameters) on {len(plan.plans)} islands of "
        f"{plan.groups.name}, {question.global_batch} × {question.sequence} tokens each, {question.precision}",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("island", style="bold", no_wrap=True)
    for name in ("GPUs", "step s", "MFU", "GiB", "host GiB/node"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", style="bold", overflow="fold")
    for name, own, held in zip(plan.names, plan.plans, plan.host_bytes, strict=True):
        cells = (f"{own.seconds:.4g}", f"{own.utilization:.1%}", f"{own.peak / GIB:.1f}", f"{held / GIB:.1f}")
        table.add_row(name, f"{own.layout.world_size:,}", *cells, str(own.layout))
    console.print(table)
    console.print(
        f"islands: every={spec.every}, fragments={spec.fragments}, delay={spec.delay}, bits={spec.bits}", style="bold"
    )
    rate = plan.tokens_per_second
    console.print(
        f"· {rate:,.0f} tokens/s: a step takes {plan.step_seconds:.4g} s with all waiting, the slowest island computes "
        f"{plan.computing:.1%} of the time"
    )
    console.print(
        f"· a fragment travels for up to {max(plan.transfers):.3g} s, {plan.hidden:.0%} of a round is hidden behind "
        f"steps; each island sends up to {max(plan.sent) / 1e9:.4g} GB in {spec.every} steps"
    )
    for other in (plan.one_job, plan.alone):
        if other is not None:
            console.print(f"· {_beside(other, rate)}", markup=False)
    if plan.one_job is None:
        console.print(f"· one job over the links: {plan.one_job_refused}", markup=False)
    console.print(f"· {plan.loss.sentence}")
    if tokens:
        console.print(f"· {amount(tokens)} tokens take {tokens / rate / 86400:.3g} days")
    for note in (*plan.notes, *plan.groups.omitted()):
        console.print(f"! {note}", style="yellow", markup=False)
    if written:
        console.print(f"written: {written} (cuboid explain, simulate and goodput read it); start the islands with")
        for line in start_lines(plan, written):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _beside(other: Other, rate: float) -> str:
    what = "one job over the links" if other.name == "one job" else f"{other.name} alone"
    return (
        f"{what}: {other.tokens_per_second:,.0f} tokens/s, islands {rate / other.tokens_per_second:.2f} × that "
        f"({other.layout}, {other.step_seconds:.4g} s a step)"
    )
