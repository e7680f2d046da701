"""What commands have in common: options of several of them, and which ones the user has given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Oversubscribe = Annotated[
    bool, typer.Option("--oversubscribe", help="Start even if memory or cores look too few for the ranks.")
]

# Where a command starts on several nodes.
Rendezvous = Annotated[str | None, typer.Option(help="HOST:PORT where nodes meet; HOST is one of them.")]
Nodes = Annotated[int | None, typer.Option(help="Nodes, each started with this same command.")]
RanksPerNode = Annotated[int | None, typer.Option(help="Default: the layout's ranks / nodes.")]
Interface = Annotated[
    str | None, typer.Option(help="Interface or address of this node; default: the one towards HOST.")
]

# A plan file, or what stands in place of one.
PlanOrModel = Annotated[str, typer.Argument(help="A plan file, or a model followed by a cluster.")]
ModelsCluster = Annotated[str | None, typer.Argument(help="The cluster, where a model is named.")]
ModelsBatch = Annotated[int | None, typer.Option(help="Sequences per step, where a model is named.")]
ModelsSequence = Annotated[
    int | None, typer.Option("--seq", "--sequence", help="Tokens per sequence, where a model is named.")
]
PlansPrecision = Annotated[
    str | None, typer.Option(help="bf16, fp16, fp8 or float32; default: the plan's, or bf16 where there is one.")
]
PlansEngine = Annotated[str | None, typer.Option(help="Profile of costs; default: the plan's, or cuboid.")]


def given_options(context: typer.Context) -> dict[str, Any]:
    """Name -> value of those on the command line, and not by default."""
    return {
        option: value
        for option, value in context.params.items()
        if getattr(context.get_parameter_source(option), "name", "") == "COMMANDLINE"
    }
