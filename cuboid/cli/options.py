"""What commands have in common: which options the user has given, and the file that `--output` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer

from cuboid.errors import UserError


def given_options(context: typer.Context) -> dict[str, Any]:
    """Name -> value of those on the command line, and not by default."""
    return {
        option: value
        for option, value in context.params.items()
        if getattr(context.get_parameter_source(option), "name", "") == "COMMANDLINE"
    }


def check_output(output: Path) -> None:
    """Refuse what `write_output` would refuse, before the work whose result it is; nothing is left behind."""
    with _refused(output), output.open("ab") if output.exists() else TemporaryFile(dir=output.parent):
        pass


def write_output(output: Path, text: str) -> None:
    """Write the file of `--output`."""
    with _refused(output):
        output.write_text(text, encoding="utf-8")


@contextmanager
def _refused(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"output={output} cannot be written: {problem.strerror}; name a file in a folder that exists"
        ) from None
