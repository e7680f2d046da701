"""What commands have in common: which options the user has given."""

from __future__ import annotations

from typing import Any

import typer


def given_options(context: typer.Context) -> dict[str, Any]:
    """Name -> value of those on the command line, and not by default."""
    return {
        option: value
        for option, value in context.params.items()
        if getattr(context.get_parameter_source(option), "name", "") == "COMMANDLINE"
    }
