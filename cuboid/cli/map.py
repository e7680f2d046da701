"""`cuboid map --layout "dp=2,tp=2,pp=2" --cluster cpux8`: which rank sits where, and which links its groups use."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.placement import Traffic, traffic
from cuboid.spec.ranks import coordinates


def command(
    layout: Annotated[str, typer.Option(help="The layout, e.g. dp=2,tp=2,pp=2.")],
    cluster: Annotated[str, typer.Option(help="The cluster: a name such as h100x64, or a TOML file.")],
    model: Annotated[str | None, typer.Option(help="Check the layout against this model too.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Draw this many nodes; default: all, or two of many.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw which rank sits where, and which links each group's traffic crosses.

    Example: cuboid map --layout "dp=2,tp=8,pp=4" --cluster h100x64 --model llama3-70b
    """
    parsed, place = Layout.parse(layout), load_cluster(cluster)
    spec = load_model(model) if model else None
    if spec:
        check_model(parsed, spec)
    lines = traffic(parsed, place, tied=spec is None or spec.tie_embeddings)
    if as_json:
        print(json.dumps(_as_json(parsed, place, lines)))
        return
    from rich.console import Console

    from cuboid.cli.map_drawing import draw

    Console(highlight=False).print(draw(parsed, place, lines, nodes))


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
