"""What `cuboid plan` and `cuboid explain` say of a plan of islands, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import TYPE_CHECKING

from cuboid.cost.rounds import EFFICIENCY
from cuboid.planning.energy import sentence
from cuboid.planning.island_alternatives import Alternative
from cuboid.planning.island_file import start_lines
from cuboid.planning.island_links import Paths, fragment_bytes
from cuboid.planning.islands import IslandsPlan
from cuboid.planning.plan import GIB, amount
from cuboid.spec.coding import encode
from cuboid.strict_json import json_text

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
        "unequal": encode(plan.unequal) if plan.unequal else None,
        "one_job_refused": plan.one_job_refused,
        "notes": list(plan.notes),
        "omitted": plan.groups.omitted(),
    }


def show(console: Console, plan: IslandsPlan, written: str = "", tokens: float | None = None) -> None:
    """The islands, how they synchronise, what that costs, and what else could be done."""
    from rich.table import Table

    question, spec = plan.plans[0].question, plan.spec
    batches = list(dict.fromkeys(own.question.global_batch for own in plan.plans))
    each = f"{batches[0]} × {question.sequence} tokens each"
    if len(batches) > 1:
        each = f"{sum(own.question.global_batch for own in plan.plans)} × {question.sequence} tokens by their speeds"
    console.print(
        f"{question.model.name} ({amount(question.model.parameters)} parameters) on {len(plan.plans)} islands of "
        f"{plan.groups.name}, {each}, {question.precision}",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("island", style="bold", no_wrap=True)
    for name in ("GPUs", "batch", "step s", "MFU", "GiB", "host GiB/node"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", style="bold", overflow="fold")
    for name, own, held in zip(plan.names, plan.plans, plan.host_bytes, strict=True):
        cells = (f"{own.seconds:.4g}", f"{own.utilization:.1%}", f"{own.peak / GIB:.1f}", f"{held / GIB:.1f}")
        table.add_row(name, f"{own.layout.world_size:,}", f"{own.question.global_batch:,}", *cells, str(own.layout))
    console.print(table)
    uneven = f", batch_weights={spec.batch_weights}" if spec.batch_weights else ""
    console.print(
        f"islands: every={spec.every}, fragments={spec.fragments}, delay={spec.delay}, bits={spec.bits}{uneven}",
        style="bold",
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
    for other in (plan.one_job, plan.unequal, plan.alone):
        if other is not None:
            console.print(f"· {_beside(other, rate)}", markup=False)
    if plan.one_job is None:
        console.print(f"· one job over the links: {plan.one_job_refused}", markup=False)
    console.print(f"· {plan.loss.sentence}")
    if tokens:
        days = tokens / rate / 86400
        console.print(f"· {amount(tokens)} tokens take {days:.3g} days, {sentence(plan.energy(days))}")
    for note in (*plan.notes, *plan.groups.omitted()):
        console.print(f"! {note}", style="yellow", markup=False)
    if written:
        console.print(f"written: {written} (cuboid explain, simulate and goodput read it); start the islands with")
        for line in start_lines(plan, written):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def explain_islands(plan: IslandsPlan, in_json: bool) -> None:
    """What `plan` has said, and how each number of a round comes about."""
    lines = formulas(plan)
    if in_json:
        print(json_text({**as_json(plan), "formulas": lines}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    show(console, plan)
    console.print("\nA round", style="bold")
    for line in lines:
        console.print(f"· {line}", markup=False)


def formulas(plan: IslandsPlan) -> list[str]:
    """With their values, so that a reader can check them by hand."""
    spec, model = plan.spec, plan.plans[0].question.model
    sizes = fragment_bytes(spec, model)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    blocks = sizes[largest] // spec.block_bytes("bf16")
    found = [
        f"{spec.fragments} fragments in {spec.every} steps: one round every {spec.every / spec.fragments:g} steps, "
        f"applied {spec.delay} steps later",
        f"the largest fragment has {blocks:,} blocks of 256 numbers × {spec.block_bytes('bf16')} bytes in "
        f"{spec.bits} bits = {sizes[largest] / 1e9:.4g} GB to each other island, and questions and framing",
    ]
    paths = Paths(plan.groups, plan.members)
    for first, second in combinations(plan.members, 2):
        link = plan.groups.link(first, second)
        found.append(
            f"{first.name} ↔ {second.name}: {link.bandwidth_gbit:g} Gbit/s × {EFFICIENCY:g} for headers and "
            f"acknowledgements = {link.rate * EFFICIENCY / 1e9:.4g} GB/s, {link.latency_ms:g} ms"
        )
    found.append(
        f"travels: {plan.transfers[largest]:.4g} s on the slowest link, with windows that grow; {paths.decide:.3g} s "
        f"each to decide who takes part and who has it all, at {plan.coordinator}"
    )
    for name, times in zip(plan.names, plan.times, strict=True):
        found.append(
            f"{name}: a step {times.step:.4g} s; a round stops it for {times.encode:.3g} s to encode and "
            f"{times.apply:.3g} s to apply, and steps beside it for {times.outer:.3g} s"
        )
    slowest = max(times.step for times in plan.times)
    waits = plan.step_seconds - slowest
    found.append(
        f"a step with all waiting: {slowest:.4g} s of the slowest island + {waits:.3g} s = {plan.step_seconds:.4g} s; "
        f"all islands take as many steps"
    )
    return found


def _beside(other: Alternative, rate: float) -> str:
    what = f"{other.name} over the links" if other.name.startswith("one job") else f"{other.name} alone"
    return (
        f"{what}: {other.tokens_per_second:,.0f} tokens/s, islands {rate / other.tokens_per_second:.2f} × that "
        f"({other.layout}, {other.step_seconds:.4g} s a step)"
    )
