"""`cuboid export RUN --to hf:DIR`: what the verb shows of it."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cuboid.checkpoint.huggingface.export import DTYPES, SHARD_SIZE, export_model
from cuboid.errors import UserError, either

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def write_model(source: str, target: Path, dtype: str | None, shard_size: str | None, as_json: bool) -> None:
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
            source, target, dtype, limit, lambda done, total: bar.update(task, completed=done, total=total)
        )
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(report)))
        return
    files = "1 file" if len(report.files) == 1 else f"{len(report.files)} files"
    print(f"{report.folder}: {report.parameters:,} parameters as {report.dtype}, {files} of {report.bytes:,} bytes")
    print(f"from {report.checkpoint}, after step {report.step}; tokenizer: {report.tokenizer}")


def parse_size(text: str) -> int:
    """`5GB`, `200MiB` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    size = int(float(match[1]) * UNITS[match[2]]) if match is not None and match[2] in UNITS else 0
    if size < 1:
        raise UserError(f"shard-size={text} is not a size; write it like 5GB or 200MB")
    return size
