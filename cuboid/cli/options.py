"""What commands have in common: options of several of them, and which ones the user has given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Oversubscribe = Annotated[
    bool, typer.Option("--oversubscribe", help="Start even if memory or cores look too few for the ranks.")
]


def given_options(context: typer.Context) -> dict[str, Any]:
    """Name -> value of those on the command line, and not by default."""
    return {
        option: value
        for option, value in context.params.items()
        if getattr(context.get_parameter_source(option), "name", "") == "COMMANDLINE"
    }
