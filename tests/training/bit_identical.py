"""Whether a training that was stopped and continued ends with the same bits as one that was not; on this machine's GPU:

    python -m tests.training.bit_identical --device cuda dp=1 dp=2,tp=2 pp=2,dp=2,zero=3,schedule=zbv

Each layout trains four steps and keeps its state after two and four; a copy of its folder without the second state goes
on; then every file of both last checkpoints is compared, and the loss of every step."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from cuboid.checkpoint.folder import checkpoint_path, withdraw
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import MANIFEST
from cuboid.checkpoint.storage import whole_tensors
from cuboid.launch.supervisor import start_training
from cuboid.spec.run import Run
from tests.training.cases import short_run


def four_steps(layout: str, folder: Path, *overrides: str) -> Run:
    own = ("training.steps=4", "checkpoint.every=2", "training.deterministic=true", "training.global_batch=4")
    layers = 4 if "schedule" in layout else 2  # with a schedule a rank may hold two pieces of a pipeline
    return short_run(layout, str(folder), *own, f"model.layers={layers}", *overrides)


def differences(layout: str, folder: Path, train: Callable[[Run], object], *overrides: str) -> list[str]:
    """The names of files and steps that differ; none is the proof."""
    whole, parts = folder / "whole", folder / "parts"
    train(four_steps(layout, whole, *overrides))
    shutil.copytree(whole, parts)
    withdraw(checkpoint_path(parts / "checkpoints", 4))
    train(four_steps(layout, parts, *overrides))
    one, other = (checkpoint_path(path / "checkpoints", 4) for path in (whole, parts))
    found = [name for name in one.names() if name != MANIFEST and (one / name).read() != (other / name).read()]
    found += [f"{name} in {count} elements" for name, count in _elements(one, other).items()]
    if one.names() != other.names():
        found.append("names")
    losses = [[json.loads(row)["loss"] for row in (path / "metrics.jsonl").open()] for path in (whole, parts)]
    return found + [f"loss of step {step}" for step, (a, b) in enumerate(zip(*losses, strict=True), 1) if a != b]


def _elements(one: Location, other: Location) -> dict[str, int]:
    """How many elements of each tensor differ."""
    ours, theirs = whole_tensors(one), whole_tensors(other)
    counts = {name: int((tensor != theirs[name]).sum()) for name, tensor in ours.items()}
    return {name: count for name, count in counts.items() if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bf16")
    arguments = parser.parse_args()
    more = (f"training.device={arguments.device}", f"training.precision={arguments.precision}")
    failed = False
    for layout in arguments.layouts:
        with TemporaryDirectory() as folder:
            found = differences(layout, Path(folder), lambda run: start_training(run, quiet=True), *more)
        print(f"{layout}: {'the same bits' if not found else 'differs in ' + ', '.join(found)}")
        failed = failed or bool(found)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
