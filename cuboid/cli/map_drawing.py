"""The picture of `cuboid map`: a panel per node, a line per tensor group, a colour per pipeline rank."""

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.layout import Layout
from cuboid.spec.placement import TensorRow, Traffic, node_rows, stage_nodes

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
