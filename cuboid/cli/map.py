"""`cuboid map --layout "dp=2,tp=2,pp=2" --cluster cpux8`: which rank sits where, and which links its groups use."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from cuboid.errors import UserError
from cuboid.planning.plan import load_plan
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.placement import Traffic, traffic
from cuboid.spec.ranks import coordinates


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
    loaded = load_plan(plan) if plan else None
    for name, given in (("layout", layout), ("cluster", cluster)):
        if not given and not loaded:
            raise UserError(f"--{name} is missing; name a plan file, or --layout and --cluster")
    parsed = loaded.layout if loaded and not layout else Layout.parse(layout or "")
    where = loaded.question.cluster if loaded and not cluster else load_cluster(cluster or "")
    spec = load_model(model) if model else loaded.question.model if loaded else None
    if spec:
        check_model(parsed, spec)
    lines = traffic(parsed, where, tied=spec is None or spec.tie_embeddings)
    if as_json:
        print(json.dumps(_as_json(parsed, where, lines)))
        return
    from rich.console import Console

    from cuboid.cli.map_drawing import draw

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
