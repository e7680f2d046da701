"""`cuboid import-deepspeed ds.json --model llama3-8b --world-size 64 -o run.toml`"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cuboid.outputs import write_output
from cuboid.planning.plan import to_choose
from cuboid.readers import read_json
from cuboid.spec.deepspeed import notes_from_deepspeed, run_table_from_deepspeed
from cuboid.spec.run import build_run, dump_run
from cuboid.spec.training import TO_CHOOSE, DataSpec
from cuboid.strict_json import json_text


def command(
    file: Annotated[Path, typer.Argument(help="The DeepSpeed-style JSON.")],
    model: Annotated[str, typer.Option(help="Model name, TOML or config.json; such a JSON does not say it.")],
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks; may be omitted if the batch sizes tell it.")
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a value, e.g. training.steps=20.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the run file here, not to the screen.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
) -> None:
    """Turn a DeepSpeed-style JSON into a run file; every key is honoured, noted or refused by name.

    Example: cuboid import-deepspeed ds.json --model llama3-8b --world-size 64 -o run.toml
    """
    config = read_json(file)
    table = {"model": model, **run_table_from_deepspeed(config, world_size)}
    for note in notes_from_deepspeed(config):
        print(f"note: {note}", file=sys.stderr)
    run = build_run(table, changes or [])
    if run.data.source == DataSpec().source and not any(change.startswith("data.source") for change in changes or []):
        run = replace(run, data=replace(run.data, source=TO_CHOOSE))  # nothing is trained on by accident
    left = [*to_choose(run), f"Such a JSON does not say training.sequence either (now {run.training.sequence})."]
    text = "".join(f"# {line}\n" for line in left) + dump_run(run)
    if output is not None:
        write_output(output, text)
    if as_json:
        print(json_text(table))
    elif output is None:
        print(text, end="")
