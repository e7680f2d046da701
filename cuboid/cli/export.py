"""`cuboid export RUN --to hf:DIR`: a trained model for others; `cuboid export plan.toml --to megatron`: a plan."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.options import write_output
from cuboid.errors import UserError
from cuboid.planning.export.targets import export
from cuboid.planning.plan import load_plan


def command(
    source: Annotated[str, typer.Argument(help="A plan file; for hf: a run's folder, its checkpoints or one of them.")],
    to: Annotated[str, typer.Option(help="megatron, deepspeed, torchtitan, nanotron, or hf:FOLDER.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="plan: write it here, not to the screen.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="hf: float32, bf16, float16 or float64; default: bf16 of a bf16 run, or float32."),
    ] = None,
    shard_size: Annotated[str | None, typer.Option(help="hf: largest file of weights; 5GB by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a trained model for Hugging Face transformers, or a plan for another engine.

    hf:FOLDER gets sharded safetensors, config.json and the tokenizer, read with memory for one file at a time. What an
    engine cannot express of a plan is refused by name.

    Example: cuboid export runs/mine --to hf:exported
    Example: cuboid export plan.toml --to megatron -o train.sh
    """
    if to.startswith("hf:"):
        if output is not None:
            raise UserError(f"output={output} is for plans; name the folder after hf:, like --to hf:{output}")
        from cuboid.cli.export_model import write_model  # here, because plans need no torch

        write_model(source, Path(to.removeprefix("hf:")), precision, shard_size, as_json)
        return
    for name, value in (("precision", precision), ("shard-size", shard_size)):
        if value is not None:
            raise UserError(f"{name}={value} is for models; use it with --to hf:FOLDER")
    if Path(source).is_dir():
        raise UserError(f"{source} is a folder and to={to} takes a plan file; use --to hf:FOLDER for a trained model")
    _write_plan(Path(source), to, output, as_json)


def _write_plan(file: Path, to: str, output: Path | None, as_json: bool) -> None:
    loaded = load_plan(file)
    text = export(loaded, to)
    if to == "deepspeed" and loaded.layout.pp > 1:
        print(f"note: pass num_stages={loaded.layout.pp} to PipelineModule in your code", file=sys.stderr)
    if output is not None:
        write_output(output, text)
    if as_json:
        print(json.dumps({"to": to, "layout": str(loaded.layout), "text": text}))
    elif output is None:
        print(text, end="")
