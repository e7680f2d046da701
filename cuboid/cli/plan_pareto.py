"""`cuboid plan` with prices or energy: the Pareto front, the chosen option and its run file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cuboid.errors import UserError
from cuboid.outputs import check_output, write_output
from cuboid.planning.choose import plans
from cuboid.planning.energy import written
from cuboid.planning.island_file import dump_islands_plan
from cuboid.planning.islands import Ask, plan_islands
from cuboid.planning.pareto import (
    FAILURES,
    Measure,
    TrainingOption,
    best,
    cluster_of,
    front,
    training_options,
    with_smaller_parts,
)
from cuboid.planning.pareto_picture import svg
from cuboid.planning.plan import amount, dump_plan
from cuboid.spec.groups import Groups
from cuboid.strict_json import json_text

SHOWN = 12
"""Rows of the front in the terminal."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of the command line."""

    objective: str
    tokens: float | None
    budget: float | None
    deadline: float | None
    output: Path | None
    picture: Path | None

    @property
    def measure(self) -> Measure:
        """The axis of the front beside days."""
        return "energy" if self.objective == "energy" else "cost"

    def check(self) -> None:
        for name, value in (("budget", self.budget), ("deadline", self.deadline), ("tokens", self.tokens)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name}={value:g} is not above 0; use {name}=1000")
        if self.objective not in ("time", "cost", "energy", "gpus"):
            raise UserError(f"objective={self.objective} is not for prices and limits; use time, cost, energy or gpus")
        if self.tokens is None:
            raise UserError("what a training costs and its energy depend on its tokens; add --tokens 1e12")
        for path in (self.output, self.picture):
            if path is not None:
                check_output(path)


def answer_pareto(groups: Groups, ask: Ask, global_batch: int, wanted: Wanted, as_json: bool) -> None:
    wanted.check()
    tokens = wanted.tokens or 0.0
    found = training_options(groups, ask, global_batch, tokens)
    if wanted.objective == "gpus":
        found = with_smaller_parts(groups, ask, global_batch, tokens, found, wanted.budget, wanted.deadline)
    chosen = best(found, wanted.objective, wanted.budget, wanted.deadline)
    fronted = front(found, wanted.measure)
    if wanted.picture is not None and not any(option.of(wanted.measure) for option in fronted):
        raise UserError(f"{groups.name} has no prices to draw; add price or spot_price to its groups")
    if wanted.output is not None:
        write_output(wanted.output, _run_file(groups, ask, global_batch, chosen, tokens))
    if wanted.picture is not None:
        write_output(wanted.picture, svg(found, chosen, f"{amount(tokens)} tokens on {groups.name}", wanted.measure))
    if as_json:
        told = {"objective": wanted.objective, "tokens": tokens, "failures": FAILURES}
        rows = [as_row(option) for option in fronted]
        print(json_text({**told, "chosen": as_row(chosen), "front": rows, "omitted": groups.omitted()}))
        return
    _show(groups, fronted, chosen, wanted)


def _run_file(groups: Groups, ask: Ask, global_batch: int, chosen: TrainingOption, tokens: float) -> str:
    if chosen.islands is not None:
        return dump_islands_plan(plan_islands(groups, ask, global_batch, {}), tokens)
    plan = plans(ask(cluster_of(groups, chosen), global_batch), top=1)[0]
    return dump_plan(replace(plan, train_tokens=tokens))


def as_row(option: TrainingOption) -> dict[str, object]:
    """An option as JSON."""
    return {
        "groups": list(option.groups),
        "spot": option.spot,
        "accelerators": option.accelerators,
        "layout": option.layout,
        "tokens_per_second": option.tokens_per_second,
        "goodput": option.goodput,
        "days": option.days,
        "cost": option.cost,
        "kwh": option.energy,
    }


def _show(groups: Groups, fronted: list[TrainingOption], chosen: TrainingOption, wanted: Wanted) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    most = "cheapest" if wanted.measure == "cost" else "least consuming"
    console.print(
        f"{amount(wanted.tokens or 0.0)} tokens on {groups.name}: the fastest and {most} ways, with failures",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("days", "cost", "kWh", "GPUs", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("on", style="bold", overflow="fold")
    step = max(1, -(-len(fronted) // SHOWN))
    shown = [option for place, option in enumerate(fronted) if place % step == 0 or option == chosen]
    for option in shown if chosen in shown else [chosen, *shown]:
        cost = "–" if option.cost is None else f"{option.cost:,.0f}" if option.cost >= 100 else f"{option.cost:.3g}"
        mark = "→" if option == chosen else ""
        energy = "–" if option.energy is None else written(option.energy)
        cells = (f"{option.days:.3g}", cost, energy, str(option.accelerators), f"{option.goodput:.1%}")
        table.add_row(mark, *cells, option.name)
    console.print(table)
    limits = [f"budget {wanted.budget:g}"] if wanted.budget is not None else []
    limits += [f"deadline {wanted.deadline:g} days"] if wanted.deadline is not None else []
    within = f" within {' and '.join(limits)}" if limits else ""
    words = {
        "time": "the fastest",
        "cost": "the cheapest",
        "energy": "the least energy",
        "gpus": "the fewest accelerators",
    }
    console.print(f"→ {words[wanted.objective]}{within}: {chosen.layout}", markup=False, style="bold")
    console.print("training: the fraction of time that is, with published failures and life_hours of what may be lost")
    console.print("kWh: at most, at board power; –: not known without watts in the cluster file")
    for sentence in groups.omitted():
        console.print(f"! {sentence}", style="yellow", markup=False)
    for what, path in (("written", wanted.output), ("picture", wanted.picture)):
        if path is not None:
            console.print(f"{what}: {path}", markup=False)
