"""A training on a disk that fills up: run as a process of its own, which may have a small disk of its own.

python -m tests.checkpoint.full_disk FOLDER half|none     the disk is full but for half a checkpoint, or wholly
python -m tests.checkpoint.full_disk FOLDER limit         files can grow no larger than half a checkpoint's
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch

from cuboid.checkpoint.folder import newest_whole
from cuboid.checkpoint.inspect import find, summarize
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from cuboid.training.run_folder import Rows
from cuboid.training.trainer import train
from tests.checkpoint.jobs import SMALL
from tests.training.cases import short_run

PAGE = 4096


def small_training(folder: Path, steps: int) -> Run:
    overrides = (*SMALL, "data.source=synthetic", "learning_rate.schedule=constant", "checkpoint.every=1")
    return short_run("dp=2,zero=1", str(folder), *overrides, f"training.steps={steps}", "training.sequence=8")


def limited(rank: int, run: Run, largest: int) -> float:
    """Larger files fail as on a full disk, with the system's own error."""
    if largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    return train(run, rank, torch.device("cpu"), quiet=True).loss


def append(rank: int, path: str) -> tuple[str, str]:
    """Rows to a file that may not grow, and that may grow again; what it held then and in the end."""
    rows = Rows(Path(path))
    rows.append({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (18, resource.RLIM_INFINITY))
    rows.append({"step": 2})
    rows.append({"step": 3})
    rows.add_to_last("checkpoints", [5])
    full = Path(path).read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    rows.append({"step": 4})
    rows.add_to_last("checkpoints", [6])
    rows.close()
    return full, Path(path).read_text()


def fill(ballast: Path) -> None:
    """To the last page, which is left."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError:
            file.truncate(file.tell() - PAGE)


def main(folder: Path, how: str) -> None:
    ballast = folder / "ballast"
    run_folder = folder / "run"
    with Pool() as pool:

        def go_on(steps: int, largest: int = 0) -> float:
            arguments = (small_training(run_folder, steps), largest)
            loss: float = pool.run("tests.checkpoint.full_disk:limited", arguments, ranks=2)[0]
            return loss

        go_on(2)
        size = summarize(find(run_folder)[-1]).bytes
        if how != "limit":
            fill(ballast)
        full_loss = go_on(5, largest=size // 4 if how == "limit" else 0)
        pool.close()  # a limit stays with its process
        _, kept, damaged = newest_whole(run_folder / "checkpoints")
        left = [path.name for path in (run_folder / "checkpoints").iterdir() if path.name.startswith(".")]
        ballast.unlink(missing_ok=True)
        loss = go_on(7)
        _, newest, _ = newest_whole(run_folder / "checkpoints")
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    facts = {
        "full_loss": full_loss,
        "kept": kept and kept.step,
        "damaged": damaged,
        "left": left,
        "loss": loss,
        "newest": newest and newest.step,
        "losses": [row["loss"] for row in rows],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
