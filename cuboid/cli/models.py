"""`cuboid models [--json]`: every model of the catalog with its size."""

from typing import Annotated

import typer

from cuboid.spec.load import catalog_models
from cuboid.spec.model import ModelSpec, load_model
from cuboid.strict_json import json_text

COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")] = False) -> None:
    """List the models Cuboid knows by name, with their sizes.

    Example: cuboid models
    """
    models = [load_model(name) for name in catalog_models()]
    if as_json:
        print(json_text([_row(model) for model in models]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model", style="bold", no_wrap=True)
    for name in ("size", "active", *COLUMNS):
        table.add_column(name.replace("kv_heads", "kv"), justify="right", no_wrap=True)
    for model in models:
        active = _size(model.active_parameters) if model.mixture else ""
        table.add_row(model.name, _size(model.parameters), active, *(str(getattr(model, name)) for name in COLUMNS))
    Console().print(table)


def _row(model: ModelSpec) -> dict[str, object]:
    sizes = {name: getattr(model, name) for name in COLUMNS}
    return {"name": model.name, "parameters": model.parameters, "active_parameters": model.active_parameters, **sizes}


def _size(count: int) -> str:
    for unit, word in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.4g} {word}"
    return str(count)
