"""`cuboid export plan.toml --to megatron`: the plan in the flags or keys of another engine."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.output import write_output
from cuboid.plan.export.targets import export
from cuboid.plan.plan import load_plan


def command(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    to: Annotated[str, typer.Option(help="megatron, deepspeed, torchtitan or nanotron.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it here, not to the screen.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the text in it.")] = False,
) -> None:
    """Write a plan for another engine; what that engine cannot express is refused by name.

    Example: cuboid export plan.toml --to megatron -o train.sh
    """
    loaded = load_plan(plan)
    text = export(loaded, to)
    if to == "deepspeed" and loaded.layout.pp > 1:
        print(f"note: pass num_stages={loaded.layout.pp} to PipelineModule in your code", file=sys.stderr)
    if output is not None:
        write_output(output, text)
    if as_json:
        print(json.dumps({"to": to, "layout": str(loaded.layout), "text": text}))
    elif output is None:
        print(text, end="")
