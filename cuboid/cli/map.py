"""`cuboid map --layout "dp=2,tp=2,pp=2" --cluster cpux8`: which rank sits where, and which links its groups use."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cuboid.cli.plan_one_job import job_in_plan, map_job
from cuboid.errors import UserError
from cuboid.planning.plan import load_plan
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.placement import TensorRow, Traffic, node_rows, stage_nodes, traffic
from cuboid.spec.plugin import layout_for
from cuboid.spec.ranks import coordinates
from cuboid.strict_json import json_text

MOST_RANKS = 1 << 18


def command(
    plan: Annotated[
        str | None, typer.Argument(help="A plan file, or a model followed by a cluster; or --layout and --cluster.")
    ] = None,
    place: Annotated[
        str | None, typer.Argument(metavar="[CLUSTER]", help="The cluster, where a model is named.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="The layout, e.g. dp=2,tp=2,pp=2.")] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster: a name such as h100x64, or a TOML file.")] = None,
    model: Annotated[str | None, typer.Option(help="Check the layout against this model too.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Draw this many nodes; default: all, or two of many.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw which rank sits where, and which links each group's traffic crosses.

    Example: cuboid map plan.toml
    Example: cuboid map llama3-70b h100x64 --layout dp=2,tp=8,pp=4
    Example: cuboid map --layout "dp=2,tp=8,pp=4" --cluster h100x64 --model llama3-70b
    """
    if place is not None:  # MODEL CLUSTER, as plan, explain and simulate have them
        for option, value in (("model", model), ("cluster", cluster)):
            if value is not None:
                raise UserError(f"--{option} {value} is given twice: {plan} {place} name model and cluster already")
        plan, model, cluster = None, plan, place
    elif plan is not None and not plan.endswith(".toml"):
        raise UserError(f"{plan} is not a plan file; write cuboid map {plan} h100x64 --layout dp=8,tp=8")
    if plan is not None and (job := job_in_plan(plan, cluster, layout, model=model, nodes=nodes)):
        map_job(job, as_json)
        return
    loaded = load_plan(plan) if plan else None
    for name, given in (("layout", layout), ("cluster", cluster)):
        if not given and not loaded:
            raise UserError(f"--{name} is missing; name a plan file, or --layout and --cluster")
    spec = load_model(model) if model else loaded.question.model if loaded else None
    if loaded and not layout:
        parsed = loaded.layout
    else:
        parsed = layout_for(spec, layout or "") if spec else Layout.parse(layout or "")
    if parsed.world_size > MOST_RANKS:
        raise UserError(f"layout={parsed} has {parsed.world_size} ranks, too many to map; use {MOST_RANKS} or less")
    where = loaded.question.cluster if loaded and not cluster else load_cluster(cluster or "")
    if spec:
        check_model(parsed, spec)
    lines = traffic(parsed, where, tied=spec is None or spec.tie_embeddings)
    if as_json:
        print(json_text(_as_json(parsed, where, lines)))
        return
    from rich.console import Console

    Console(highlight=False).print(draw(parsed, where, lines, nodes))


def _as_json(layout: Layout, cluster: ClusterSpec, lines: list[Traffic]) -> dict[str, object]:
    ranks = [
        {"rank": rank, "node": cluster.node_of(rank), **asdict(coordinates(rank, layout))}
        for rank in range(layout.world_size)
    ]
    return {
        "layout": str(layout),
        "cluster": cluster.name,
        "world_size": layout.world_size,
        "nodes": cluster.nodes,
        "accelerators_per_node": cluster.accelerators_per_node,
        "stages_of_pipeline_rank": [layout.stages_of(rank) for rank in range(layout.pp)],
        "ranks": ranks,
        "traffic": [asdict(line) for line in lines],
    }


COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
MANY_RANKS = 16
"""Longer rows of ranks are shown by their ends."""
MANY_STAGES = 24
MANY_ROWS = 72
"""Of a node with more tensor groups, the first and last are drawn."""
MANY_NODES = 8
SAMPLE = 2
"""Nodes drawn of a cluster that has many."""


def draw(layout: Layout, cluster: ClusterSpec, lines: list[Traffic], asked: int | None) -> RenderableType:
    """Everything `cuboid map` prints; `asked` is how many nodes to draw."""
    shown = min(asked or (SAMPLE if cluster.nodes > MANY_NODES else cluster.nodes), cluster.nodes)
    parts: list[RenderableType] = [_heading(layout, cluster), ""]
    width = len(str(shown * cluster.accelerators_per_node - 1))
    parts.append(Columns([_node(layout, cluster, node, width) for node in range(shown)], padding=(0, 1)))
    if layout.tp > 1:
        split = cluster.accelerators_per_node % layout.tp
        parts.append(Text("[ ] is a tensor group" + ("; … where it continues on another node" if split else ""), "dim"))
    if shown < cluster.nodes:
        rest = _count(cluster.nodes - shown, "more node")
        parts.append(Text(f"and {rest}, filled in the same order (--nodes {cluster.nodes} draws all)", "dim"))
        if layout.pp > 1:
            parts += ["", _stages(layout, cluster)]
    parts += ["", _traffic(lines) if lines else Text("One rank: nothing travels.", "dim")]
    return Group(*parts)


def _heading(layout: Layout, cluster: ClusterSpec) -> Text:
    counts = f"{_count(layout.world_size, 'rank')}, {_count(cluster.nodes, 'node')} of {cluster.accelerators_per_node}"
    return Text.assemble((str(layout), "bold"), " on ", (cluster.name, "bold"), f": {counts}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _colour(pipeline_rank: int) -> str:
    return COLOURS[pipeline_rank % len(COLOURS)]


def _node(layout: Layout, cluster: ClusterSpec, node: int, width: int) -> Panel:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows, half = list(node_rows(layout, cluster, node)), MANY_ROWS // 2
    for index, row in enumerate(rows):
        if len(rows) <= MANY_ROWS or not half <= index < len(rows) - half:
            table.add_row(_label(layout, row), _ranks(layout, row, width))
        elif index == half:
            table.add_row("…", "…", style="dim")
    return Panel(table, title=f"node {node}", title_align="left", border_style="dim", expand=False)


def _label(layout: Layout, row: TensorRow) -> Text:
    """Stage, replica and part of the sequence, each only where there are several."""
    words = []
    if layout.stages > 1:
        stages = layout.stages_of(row.pp)
        words.append(f"{'stage' if len(stages) == 1 else 'stages'} {'+'.join(map(str, stages))}")
        if layout.layers:
            words.append(f"{'+'.join(str(layout.layers[stage]) for stage in stages)} layers")
    if layout.dp > 1:
        words.append(f"replica {row.dp}")
    if layout.cp > 1:
        words.append(f"part {row.cp}")
    return Text("  ".join(words) or "ranks", _colour(row.pp))


def _ranks(layout: Layout, row: TensorRow, width: int) -> Text:
    numbers = [f"{rank:>{width}}" for rank in row.ranks]
    if len(numbers) > MANY_RANKS:
        numbers = [*numbers[:4], "to", numbers[-1]]
    opening = "[" if row.ranks[0] % layout.tp == 0 else "…"
    closing = "]" if (row.ranks[-1] + 1) % layout.tp == 0 else "…"
    return Text(opening + " ".join(numbers) + closing, f"bold {_colour(row.pp)}")


def _stages(layout: Layout, cluster: ClusterSpec) -> Table:
    """Where each pipeline rank sits, for clusters that are not drawn whole."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("pipeline rank", "stages", "nodes", "ranks"):
        table.add_column(name, no_wrap=True)
    size, half = layout.world_size // layout.pp, MANY_STAGES // 2
    for rank in range(layout.pp):
        if layout.pp > MANY_STAGES and half <= rank < layout.pp - half:
            if rank == half:
                table.add_row("…", "…", "…", "…", style="dim")
            continue
        first, last = stage_nodes(layout, cluster, rank)
        nodes = str(first) if first == last else f"{first}–{last}"
        stages = "+".join(map(str, layout.stages_of(rank)))
        table.add_row(str(rank), stages, nodes, f"{rank * size}–{(rank + 1) * size - 1}", style=_colour(rank))
    return table


def _traffic(lines: list[Traffic]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("group", style="bold", no_wrap=True)
    table.add_column("n × size", justify="right", no_wrap=True)
    table.add_column("the first", no_wrap=True)
    table.add_column("slowest link")
    table.add_column("what travels")
    for line in lines:
        groups = f"{len(line.groups):,} × {line.size}"
        table.add_row(line.kind, groups, _members(line.groups[0]), _links(line), line.carries)
    return table


def _members(group: tuple[int, ...]) -> str:
    if len(group) <= 4:
        return " ".join(map(str, group))
    return f"{group[0]} {group[1]} … {group[-1]}"


def _links(line: Traffic) -> Text:
    """The slowest link, and how many of the groups (hops, for pp) cross it where not all do."""
    text = Text(f"{line.slowest.name} {line.slowest.bandwidth:g} GB/s")
    total, slow = sum(line.tiers.values()), line.tiers[line.slowest.name]
    if slow < total:
        text.append(f" ({slow}/{total})", "dim")
    return text
