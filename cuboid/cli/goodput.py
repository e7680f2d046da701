"""`cuboid goodput`: how much of the time will be training when machines fail, and how often to save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from xml.sax.saxutils import escape

import typer

from cuboid.cli.goodput_islands import tell_islands
from cuboid.cost.goodput import (
    HOUR,
    MOST_SAVES,
    PUBLISHED,
    Costs,
    MemoryCopies,
    Recommendation,
    TimeSpent,
    curve,
    effective_fraction,
    recommend,
    simulate,
    young_daly,
)
from cuboid.errors import UserError, either
from cuboid.outputs import write_output
from cuboid.planning.island_file import load_islands_plan, plans_islands
from cuboid.planning.islands import IslandsPlan
from cuboid.readers import read_toml
from cuboid.resilience.goodput import Measured, measured
from cuboid.spec.run import Run, load_run
from cuboid.strict_json import json_text

SIZES = (1024, 16384, 100000)
CENTURY = 100 * 365 * 24 * HOUR
RECOVERIES = 5
"""Mean times between failures that a recovery may take: e^5 attempts are made for one that succeeds."""


@dataclass(frozen=True)
class Case:
    """One size, with or without copies in memory."""

    accelerators: int
    mtbf: float
    best: Recommendation
    textbook: float
    spent: TimeSpent

    @property
    def in_memory(self) -> bool:
        return self.best.costs.memory is not None


def command(
    file: Annotated[
        Path | None, typer.Argument(help="A run or plan file: its size, its steps, and its saves where it has saved.")
    ] = None,
    gpus: Annotated[
        list[int] | None, typer.Option(min=1, max=10_000_000, help="Accelerators; may be given several times.")
    ] = None,
    failures: Annotated[str, typer.Option(help=f"Published failure rates: {either(PUBLISHED)}.")] = "rsc",
    mtbf_hours: Annotated[
        float | None, typer.Option(min=0.001, help="Mean hours between failures, in place of published ones.")
    ] = None,
    interval: Annotated[float | None, typer.Option(min=1, help="Seconds between checkpoints; default: best.")] = None,
    stall: Annotated[
        float | None, typer.Option(min=0, help="Seconds training waits for a save; 1, or measured.")
    ] = None,
    write: Annotated[float | None, typer.Option(min=0, help="Seconds a save is written; 67, or measured.")] = None,
    detect: Annotated[float, typer.Option(min=0, help="Seconds until a failure is known.")] = Costs.detect,
    restart: Annotated[
        float | None, typer.Option(min=0, help="Seconds until ranks can load; 180, or measured with the other two.")
    ] = None,
    load: Annotated[float, typer.Option(min=0, help="Seconds to load from disk.")] = Costs.load,
    memory_stall: Annotated[
        float | None, typer.Option(min=0, help="Seconds training waits for a copy in memory; 0.2, or measured.")
    ] = None,
    memory_load: Annotated[float, typer.Option(min=0, help="Seconds to load from memory.")] = 5.0,
    memory_survives: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of failures that leave a copy in memory.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulated failures.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Write the goodput over the interval as an SVG picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Expect how much of the time is training, with checkpoints on disk alone and with copies in memory.

    The closed form beside a simulation through up to 400 failures, at the checkpoint interval that makes it largest.

    Example: cuboid goodput --gpus 16384 --failures llama3 --picture goodput.svg

    Example: cuboid goodput run.toml --mtbf-hours 20

    Of a plan of islands: an island that is lost costs its own part, and starts again while the others train.
    """
    if failures not in PUBLISHED:
        raise UserError(f"failures={failures} is not known; use {either(PUBLISHED)}, or --mtbf-hours")
    islands: IslandsPlan | None = None
    run: Run | None = None
    if file is not None and plans_islands(read_toml(file)):
        islands, run = load_islands_plan(file)
    else:
        run = load_run(file) if file is not None else None
    seen = measured(run.output.folder) if run is not None else Measured()
    costs = Costs(
        stall=_first(stall, seen.stall if seen.saved else None, Costs.stall),
        write=_first(write, seen.write if seen.saved else None, Costs.write),
        detect=detect,
        restart=_first(restart, max(0.0, seen.recovery - detect - load) if seen.failures else None, Costs.restart),
        load=load,
    )
    copies = MemoryCopies(
        stall=_first(memory_stall, seen.copy_stall if seen.copied else None, MemoryCopies.stall),
        write=_first(seen.copy_write if seen.copied else None, MemoryCopies.write),
        load=memory_load,
        survives=memory_survives,
    )
    _check_numbers(costs, copies, mtbf_hours, interval)
    published = f"{PUBLISHED[failures].source}; beyond that every accelerator fails as often"
    source = f"a failure every {mtbf_hours:g} h" if mtbf_hours else published
    if islands is not None:
        for name, value in (("gpus", gpus), ("interval", interval), ("picture", picture)):
            if value is not None:
                raise UserError(f"{name}={value} is not for a plan of islands; omit it")
        whole = islands.groups.accelerators

        def between(accelerators: int) -> float:
            """The hours that are given are those of all accelerators together."""
            if mtbf_hours:
                return HOUR * mtbf_hours * whole / accelerators
            return PUBLISHED[failures].seconds(accelerators)

        tell_islands(islands, between, costs, source, seed, as_json)
        return
    sizes = gpus or ([run.layout.world_size] if run is not None else list(SIZES))
    cases = [
        _case(size, HOUR * mtbf_hours if mtbf_hours else PUBLISHED[failures].seconds(size), kind, interval, seed)
        for size in sizes
        for kind in (costs, replace(costs, memory=copies))
    ]
    if picture is not None:
        write_output(picture, _picture(cases, source))
    if as_json:
        print(json_text({"failures": source, "costs": asdict(costs), "cases": [_as_json(case) for case in cases]}))
        return
    _show(cases, costs, source, _step_seconds(run, seen))
    if picture is not None:
        print(f"picture: {picture}")


def _check_numbers(costs: Costs, copies: MemoryCopies, mtbf_hours: float | None, interval: float | None) -> None:
    """What no training has, and no float holds."""
    found = {"mtbf-hours": (mtbf_hours or 1.0) * HOUR, "interval": interval or 1.0}
    found |= {f"memory-{name}": getattr(copies, name) for name in ("stall", "write", "load")}
    found |= {name: getattr(costs, name) for name in ("stall", "write", "detect", "restart", "load")}
    for name, seconds in found.items():
        if not 0 <= seconds <= CENTURY:  # nan is neither
            raise UserError(f"{name}={seconds:g} s is no time a training has; use {CENTURY:.2g} s or less")


def _first(*values: float | None) -> float:
    """What the command line says, else what the run's folder shows, else what others have published."""
    return next(value for value in values if value is not None)


def _step_seconds(run: Run | None, seen: Measured) -> float | None:
    planned = run.plan.get("step_seconds") if run is not None else None
    return seen.usual_step or (float(planned) if isinstance(planned, int | float) else None)


def _case(size: int, mtbf: float, costs: Costs, interval: float | None, seed: int) -> Case:
    if costs.recovery > RECOVERIES * mtbf:
        raise UserError(
            f"a failure every {mtbf:.3g} s leaves no time to train, because recovery takes {costs.recovery:.3g} s; "
            "use a longer --mtbf-hours, fewer --gpus, or a shorter --detect, --restart and --load"
        )
    if interval is not None and mtbf / interval > MOST_SAVES:
        raise UserError(
            f"interval={interval:g} saves {mtbf / interval:,.0f} times between two failures; use "
            f"interval={math.ceil(mtbf / MOST_SAVES)} or more"
        )
    best = recommend(mtbf, costs)
    if interval is not None:
        best = replace(best, interval=interval, fraction=effective_fraction(mtbf, interval, best.costs))
    spent = simulate(mtbf, best.interval, best.costs, seed=seed)
    return Case(size, mtbf, best, young_daly(mtbf, costs.stall), spent)


def _picture(cases: list[Case], source: str) -> str:
    intervals = [10 * 10 ** (exponent / 60) for exponent in range(60 * 3 + 1)]
    sizes = list(dict.fromkeys(case.accelerators for case in cases))
    lines = [
        Line(
            f"{case.accelerators:,}{', copies in memory' if case.in_memory else ' GPUs'}: {case.best.fraction:.1%}",
            sizes.index(case.accelerators),
            case.in_memory,
            curve(case.mtbf, case.best.costs, intervals),
            (min(max(case.best.interval, intervals[0]), intervals[-1]), case.best.fraction),
        )
        for case in cases
    ]
    return svg(intervals, lines, "Fraction of the time that is training", source)


def _as_json(case: Case) -> dict[str, object]:
    memory, spent = case.best.costs.memory, case.spent
    return {
        "accelerators": case.accelerators,
        "mean_seconds_between_failures": case.mtbf,
        "copies_in_memory": case.in_memory,
        "interval_seconds": case.best.interval,
        "memory_interval_seconds": memory.every if memory else None,
        "young_daly_seconds": case.textbook,
        "expected": case.best.fraction,
        "simulated": spent.effective,
        "simulated_failures": spent.failures,
        "redone": spent.redone / spent.total,
        "saving": spent.saving / spent.total,
        "down": spent.down / spent.total,
    }


def _show(cases: list[Case], costs: Costs, source: str, step: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    print(source)
    print(
        f"seconds: stall {costs.stall:.3g}, write {costs.write:.3g}, detect {costs.detect:g}, restart "
        f"{costs.restart:.3g}, load {costs.load:g}"
    )
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("GPUs", justify="right")
    for header in ("failure", "to disk", "to memory", "training", "simulated", "redone", "saving", "down"):
        table.add_column(header, justify="right", no_wrap=True)
    for case in cases:
        memory, spent = case.best.costs.memory, case.spent
        table.add_row(
            f"{case.accelerators:,}",
            *(duration(seconds) for seconds in (case.mtbf, case.best.interval)),
            duration(memory.every) if memory else "never",
            *(f"{fraction:.1%}" for fraction in (case.best.fraction, spent.effective)),
            *(f"{part / spent.total:.1%}" for part in (spent.redone, spent.saving, spent.down)),
        )
    Console(highlight=False).print(table)
    print("failure: mean time between them; to disk, to memory: training between checkpoints")
    if step:
        for case in cases:
            copies = case.best.costs.memory
            also = f", checkpoint.memory_every={_steps(copies.every, step)}" if copies else ""
            print(f"with steps of {step:.3g} s: checkpoint.every={_steps(case.best.interval, step)}{also}")


def _steps(seconds: float, step: float) -> int:
    return max(1, round(seconds / step))


def duration(seconds: float) -> str:
    """To two or three digits, in the unit a person would use.

    >>> duration(95), duration(5400)
    ('95 s', '1.5 h')
    """
    for unit, size, least in (("h", 3600, 5400), ("min", 60, 100)):
        if seconds >= least:
            digits = 0 if seconds / size >= 10 or math.isclose(seconds / size, round(seconds / size)) else 1
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


# The fraction of the time that is training over the checkpoint interval, as an SVG picture: one colour for each size.


INK, GRID = "#1b1b1b", "#d9d9d4"
COLOURS = ("#4c78a8", "#54a24b", "#e45756", "#b279a2", "#eeca3b", "#76b7b2")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 460, 64, 64, 270, 52
TICKS = {10: "10 s", 30: "30 s", 60: "1 min", 300: "5 min", 900: "15 min", 3600: "1 h", 14400: "4 h", 86400: "1 day"}


@dataclass(frozen=True)
class Line:
    label: str
    colour: int
    """Number of the size it belongs to."""
    dashed: bool
    fractions: Sequence[float]
    """At each interval; not a number where nothing is to be drawn."""
    best: tuple[float, float]
    """Interval and fraction of the dot."""


def svg(intervals: Sequence[float], lines: Sequence[Line], title: str, subtitle: str) -> str:
    """The picture as text of an SVG file."""
    low = min(fraction for line in lines for fraction in line.fractions if not math.isnan(fraction))
    floor = max(0.0, math.floor(10 * low) / 10)

    def place(interval: float, fraction: float) -> tuple[float, float]:
        first, last = math.log(intervals[0]), math.log(intervals[-1])
        across = (math.log(interval) - first) / (last - first)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + (1 - fraction) / (1 - floor) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, 16, weight="bold"),
        _text(LEFT, 44, subtitle, 12),
    ]
    for tenth in range(round(10 * floor), 11):
        _, y = place(intervals[0], tenth / 10)
        parts.append(_rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 8, y + 4, f"{10 * tenth} %", 11, anchor="end"))
    for seconds, label in TICKS.items():
        if intervals[0] <= seconds <= intervals[-1]:
            x, _ = place(seconds, 1.0)
            parts.append(_rule(x, TOP, x, HEIGHT - BOTTOM))
            parts.append(_text(x, HEIGHT - BOTTOM + 16, label, 11, anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "between checkpoints on disk", 12, anchor="middle"))
    for number, line in enumerate(lines):
        colour = COLOURS[line.colour % len(COLOURS)]
        points = [
            place(interval, fraction)
            for interval, fraction in zip(intervals, line.fractions, strict=True)
            if not math.isnan(fraction) and fraction >= floor
        ]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = place(*line.best)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        y = TOP + 12 + 34 * number
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 16}" y1="{y - 4}" x2="{WIDTH - RIGHT + 44}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(_text(WIDTH - RIGHT + 52, y, line.label, 12))
    return "\n".join([*parts, "</svg>", ""])


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}" stroke-width="0.7"/>'


def _text(x: float, y: float, text: str, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
