"""`cuboid train run.toml`: train on this machine, or join the ranks that torchrun or Slurm started."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cuboid.errors import UserError
from cuboid.launch.pool import RankError
from cuboid.spec.load import read_toml
from cuboid.spec.run import Run, build_run


def command(
    file: Annotated[Path | None, typer.Argument(help="The run file; left out: a tiny model on Python's own source.")] = None,
    layout: Annotated[str | None, typer.Option(help="Layout in place of the run file's, e.g. dp=2,tp=2,pp=2.")] = None,
    model: Annotated[str | None, typer.Option(help="Model in place of the run file's: a name or a TOML file.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change one field: training.steps=20.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object, at the end.")] = False,
) -> int:
    """Train a model on a layout. Ranks of this machine are started here; under torchrun or Slurm this process joins.

    Example: cuboid train examples/demo.toml --layout dp=4,pp=2 --set training.steps=20
    """
    run = _run(file, layout, model, overrides or [])
    from cuboid.launch.place import find_place
    from cuboid.launch.training import start_training
    from cuboid.spec.supported import check_supported
    from cuboid.train.folder import prepare_folder

    check_supported(run)
    import os

    place = find_place(os.environ)
    speaks = place is None or place.rank == 0
    if speaks:
        prepare_folder(run, overwrite)
        if not as_json:
            _announce(run)
    try:
        start_training(run, quiet=as_json)
    except RankError as error:
        print(f"error: {error}", file=__import__("sys").stderr)
        return 1
    if speaks:
        _conclude(run, as_json)
    return 0


def _run(file: Path | None, layout: str | None, model: str | None, overrides: list[str]) -> Run:
    table: dict[str, Any] = dict(read_toml(file)) if file is not None else {"model": "tiny-llama"}
    if layout is not None:
        table["layout"] = layout
    if model is not None:
        table["model"] = model
    return build_run(table, overrides, folder=file.parent if file is not None else Path())
