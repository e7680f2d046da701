"""`cuboid export RUN --to hf:DIR`: a trained model for others; `cuboid export plan.toml --to megatron`: a plan."""

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cuboid.errors import UserError, either
from cuboid.outputs import write_output
from cuboid.planning.export.engines import export, refuse_recipe
from cuboid.planning.plan import load_plan
from cuboid.spec.run import load_run
from cuboid.strict_json import json_text

SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


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
    average: Annotated[bool, typer.Option("--average", help="hf: the moving average of the weights.")] = False,
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
        write_model(source, Path(to.removeprefix("hf:")), precision, shard_size, as_json, average)
        return
    if average:
        raise UserError("--average is for models; use it with --to hf:FOLDER")
    for name, value in (("precision", precision), ("shard-size", shard_size)):
        if value is not None:
            raise UserError(f"{name}={value} is for models; use it with --to hf:FOLDER")
    if Path(source).is_dir():
        raise UserError(f"{source} is a folder and to={to} takes a plan file; use --to hf:FOLDER for a trained model")
    _write_plan(Path(source), to, output, as_json)


def _write_plan(file: Path, to: str, output: Path | None, as_json: bool) -> None:
    loaded = load_plan(file)
    refuse_recipe(load_run(file), to)
    text = export(loaded, to)
    if to == "deepspeed" and loaded.layout.pp > 1:
        print(f"note: pass num_stages={loaded.layout.pp} to PipelineModule in your code", file=sys.stderr)
    if output is not None:
        write_output(output, text)
    if as_json:
        print(json_text({"to": to, "layout": str(loaded.layout), "text": text}))
    elif output is None:
        print(text, end="")


def write_model(
    source: str, target: Path, dtype: str | None, shard_size: str | None, as_json: bool, average: bool = False
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from cuboid.checkpoint.huggingface.export import DTYPES, SHARD_SIZE, export_model  # here: plans need no torch

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"precision={dtype} is unknown; use {either(DTYPES)}")
    limit = SHARD_SIZE if shard_size is None else parse_size(shard_size)
    if "://" not in source and not Path(source).is_dir():
        problem = "is a file" if Path(source).exists() else "does not exist"
        raise UserError(f"{source} {problem}; name a run's folder, its checkpoints or one of them")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("writing files of weights", total=None)
        report = export_model(
            source, target, dtype, limit, lambda done, total: bar.update(task, completed=done, total=total), average
        )
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json_text(asdict(report)))
        return
    files = "1 file" if len(report.files) == 1 else f"{len(report.files)} files"
    print(f"{report.folder}: {report.parameters:,} parameters as {report.dtype}, {files} of {report.bytes:,} bytes")
    print(f"from {report.checkpoint}, after step {report.step}; tokenizer: {report.tokenizer}")


def parse_size(text: str) -> int:
    """`5GB`, `200MiB` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    size = int(float(match[1]) * SIZE_UNITS[match[2]]) if match is not None and match[2] in SIZE_UNITS else 0
    if size < 1:
        raise UserError(f"shard-size={text} is not a size; write it like 5GB or 200MB")
    return size
