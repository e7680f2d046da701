"""What the benchmarks of islands share: their options, `cuboid train` of one island each, and what it wrote."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuboid.training.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuboid.training.trainer import Trainer

CUBOID = [sys.executable, "-m", "cuboid.cli.main"]
PACE = "CUBOID_BENCHMARK_STEP"


class Paced(Callback):
    """A step takes as long as the environment says: islands whose steps an accelerator computes, while the CPU is free
    for what is between them."""

    def around_step(self, trainer: Trainer, step: int) -> AbstractContextManager[object]:
        seconds = float(os.environ.get(PACE, "0"))
        return _at_least(seconds) if seconds else nullcontext()


@contextmanager
def _at_least(seconds: float) -> Iterator[None]:
    until = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, until - time.perf_counter()))


def options_of(text: str | None, numbers: Mapping[str, float]) -> argparse.ArgumentParser:
    """`text`: of --help. `numbers`: options with their defaults; a whole one takes whole numbers."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", help="append every row to this file")
    parser.add_argument("--table", help="print the table of this file, train nothing")
    return parser


def rows_of(file: str) -> list[dict[str, Any]]:
    """That `--json` wrote."""
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def command(folder: Path, number: int, places: str, settings: Mapping[str, object]) -> list[str]:
    """Of one island; `settings` beside where it writes."""
    table = {"output.folder": folder, "output.log_every": 1000000, "output.health": False, **settings}
    table["training.callbacks"] = f"python:{Path(__file__).absolute()}:Paced"
    made = [part for name, value in table.items() for part in ("--set", f"{name}={_text(value)}")]
    return [*CUBOID, "train", "--oversubscribe", *made, "--island", str(number), "--islands-rendezvous", places]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def environment(step_seconds: float) -> dict[str, str]:
    return {
        **os.environ,
        "CUBOID_SECRET": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
        PACE: str(step_seconds),
    }


def rows(folder: Path, number: int) -> list[dict[str, Any]]:
    path = folder / f"island-{number}" / "metrics.jsonl"
    found = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("}")]


def finish(processes: Sequence[subprocess.Popen[Any]], log: Path | None = None) -> None:
    for process in processes:
        if process.wait():
            said = log.read_text()[-2000:] if log is not None else ""
            raise SystemExit(f"an island failed with exit code {process.returncode}\n{said}")


def tell(row: Mapping[str, object], file: str | None) -> None:
    """As it comes."""
    print(json.dumps(row), flush=True)
    if file:
        with open(file, "a") as kept:
            kept.write(json.dumps(row) + "\n")
