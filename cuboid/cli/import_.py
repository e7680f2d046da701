"""`cuboid import hf:DIR -o run.toml`: a run file that starts from the weights of a Hugging Face model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cuboid.checkpoint.huggingface.folder import ModelFolder, model_of, read_config
from cuboid.checkpoint.weights import PREFIX, check_weights
from cuboid.errors import UserError
from cuboid.outputs import write_output
from cuboid.spec.huggingface import dropout_of
from cuboid.spec.load import dump_model
from cuboid.spec.run import build_run, dump_run
from cuboid.strict_json import json_text


def command(
    source: Annotated[str, typer.Argument(help="hf:FOLDER, with config.json and safetensors.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a value, e.g. training.steps=20.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the run file here, not to the screen.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Prepare a run that starts from a Hugging Face model. The folder is checked and stays where it is: when the run
    starts, every rank reads the slices of it that it keeps, whatever the layout.

    Example: cuboid import hf:models/Qwen3-0.6B -o tune.toml
    """
    if not source.startswith(PREFIX):
        raise UserError(
            f"source={source} has no kind; write {PREFIX}{source}, or use cuboid import-deepspeed for a JSON"
        )
    folder = Path(source.removeprefix(PREFIX))
    model, weights = model_of(folder), ModelFolder(folder)
    if model.mixture is not None:  # its routers have learned where to send tokens
        model = replace(model, mixture=replace(model.mixture, router_noise=0.0))
    check_weights(weights, model)
    name = output.stem if output is not None else model.name
    dropout, notes = dropout_of(read_config(folder))
    small = {tensor.dtype for tensor in weights.tensors.values()} <= {"BF16", "F16"}
    table = {
        "model": dump_model(model),
        "training": {
            "start_from": source,
            "sequence": min(model.max_positions, 1024),
            "precision": "bf16" if small else "float32",
            "dropout": dropout,
        },
        "learning_rate": {"peak": 1e-5, "warmup_steps": 10},
        "data": {"source": f"{name}-tokens"},
        "checkpoint": {"every": 100},
        "output": {"folder": f"runs/{name}"},
    }
    run = build_run(table, changes or [])
    build = f"cuboid data build FILES --tokenizer {folder} -o {run.data.source}"
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    text = f"# Starts from {source}. Its data: {build}\n{dump_run(run)}"
    if output is not None:
        write_output(output, text)
    if as_json:
        found = {"model": model.name, "family": model.family, "parameters": model.parameters, "bytes": weights.bytes}
        print(json_text({**found, "tensors": len(weights.tensors), "output": output and str(output)}))
    elif output is None:
        print(text, end="")
    else:
        print(f"{source}: {model.family}, {model.parameters:,} parameters, {weights.bytes:,} bytes, every tensor there")
        print(f"next: {build}   (--completions for prompts and completions)")
        print(f"then: cuboid train {output}")
