"""`cuboid map --layout "dp=2,tp=2,pp=2" --cluster cpux8`: which rank sits where, and which links its groups use."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cuboid.errors import UserError
from cuboid.plan.plan import load_plan
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.placement import Traffic, traffic
from cuboid.spec.ranks import coordinates


def command(
    plan: Annotated[Path | None, typer.Argument(help="A plan file; or --layout and --cluster.")] = None,
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
    Example: cuboid map --layout "dp=2,tp=8,pp=4" --cluster h100x64 --model llama3-70b
    """
    loaded = load_plan(plan) if plan else None
    for name, given in (("layout", layout), ("cluster", cluster)):
        if not given and not loaded:
            raise UserError(f"--{name} is missing; name a plan file, or --layout and --cluster")
    parsed = loaded.layout if loaded and not layout else Layout.parse(layout or "")
    place = loaded.question.cluster if loaded and not cluster else load_cluster(cluster or "")
    spec = load_model(model) if model else loaded.question.model if loaded else None
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
