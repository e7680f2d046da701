"""Plans as a table, and the first one in a few lines."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from cuboid.planning.plan import GIB, Plan
from cuboid.planning.reasons import amount, error_line, losses


def show(console: Console, plans: list[Plan], written: Path | None = None, tokens: float | None = None) -> None:
    """The table of all of them, and why the first one is first."""
    first = plans[0]
    question = first.question
    console.print(
        f"{question.model.name} ({amount(question.model.parameters)} parameters) on {question.cluster.name}, "
        f"global batch {question.global_batch} × {question.sequence} tokens, {question.precision}, "
        f"engine {question.engine}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("step s", "tokens/s/GPU", "MFU", "GiB", "of all", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    # Last, because it is the longest and may be folded.
    table.add_column("layout", style="bold", overflow="fold")
    for plan in plans:
        table.add_row(
            f"{plan.seconds:.4g}",
            f"{plan.tokens:,.0f}",
            f"{plan.utilization:.1%}",
            f"{plan.peak / GIB:.1f}",
            f"{plan.share:.0%}",
            f"{plan.bubble:.1%}",
            str(plan.layout),
        )
    console.print(table)
    for reason in first.reasons:
        console.print(f"· {reason}")
    days = f"; {amount(tokens)} take {first.days(tokens):.3g} days on {question.cluster.name}" if tokens else ""
    console.print(f"· a billion tokens cost {first.hours:,.4g} GPU-hours{days}")
    if first.alternatives:
        other = first.alternatives[0]
        slower = other.step_seconds / first.seconds - 1
        console.print(f"· next: {other.layout} takes {slower:+.1%} ({losses(first.parts, other.parts) or 'no part'})")
    console.print(f"· {error_line(first)}")
    for warning in first.warnings:
        console.print(f"! {warning}", style="yellow")
    if written is not None:
        console.print(f"written: {written} (cuboid explain, simulate, export or train it)")
        console.print("before you train it, choose data.source, training.steps and the others its first lines name")
