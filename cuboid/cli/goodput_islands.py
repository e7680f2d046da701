"""`cuboid goodput islands.toml`: what islands get done when islands are lost, beside one job over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from cuboid.cost.goodput import Costs, recommend
from cuboid.cost.island_goodput import IslandFailures, simulate_islands
from cuboid.planning.island_failures import failures_of, goodput_of
from cuboid.planning.islands import IslandsPlan
from cuboid.strict_json import json_text


def tell_islands(
    plan: IslandsPlan, between: Callable[[int], float], costs: Costs, source: str, seed: int, as_json: bool
) -> None:
    """`between`: mean seconds between failures of so many accelerators."""
    islands = failures_of(plan, between, costs)
    found = goodput_of(plan, islands)
    simulated = simulate_islands(islands, plan.spec.grace_seconds, seed=seed)
    together = 1 / sum(1 / each.mtbf for each in islands)
    one_job = recommend(together, costs).fraction
    if as_json:
        rows = [
            {"name": name, "mtbf_seconds": each.mtbf, "down_seconds": each.down, "redone_seconds": each.redone}
            | {"present": present}
            for name, each, present in zip(plan.names, islands, found.present, strict=True)
        ]
        told = {"expected": found.expected, "simulated": simulated, "survivors_lose": found.survivors_lose}
        told |= {"tokens_per_second": plan.tokens_per_second * found.expected}
        print(json_text({"failures": source, "costs": asdict(costs), "islands": rows, **told, "one_job": one_job}))
        return
    _show(plan, islands, source, found.present)
    print(
        f"islands: {found.expected:.1%} of what all would do without failures (simulated {simulated:.1%}), "
        f"{plan.tokens_per_second * found.expected:,.0f} tokens/s; those that live lose {found.survivors_lose:.2%}, "
        f"at most islands.grace_seconds={plan.spec.grace_seconds:g} for each that is lost"
    )
    print(f"one job over all of them: {one_job:.1%}, a failure every {_told(together)} stops everything")


def _show(plan: IslandsPlan, islands: list[IslandFailures], source: str, present: tuple[float, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    print(source)
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("island")
    for header in ("GPUs", "lost every", "away for", "redone", "training"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, own, each, part in zip(plan.names, plan.plans, islands, present, strict=True):
        times = (_told(seconds) for seconds in (each.mtbf, each.down, each.redone))
        table.add_row(name, f"{own.layout.world_size:,}", *times, f"{part:.1%}")
    Console(highlight=False).print(table)
    print("away: known, started, state fetched from another island, entered; redone: its steps since its last rounds")


def _told(seconds: float) -> str:
    from cuboid.cli.goodput import duration

    return duration(seconds)
