"""The folder of a run: what it holds, and that it never holds two runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cuboid.checkpoint.location import Location, locate
from cuboid.errors import UserError
from cuboid.spec.run import Run, dump_run, load_run

RUN_FILE = "run.toml"
WRITTEN = ("metrics.jsonl", "timing-*.jsonl")
REPORTS = "failure-*.txt"


def checkpoint_folder(run: Run) -> Location:
    return locate(run.checkpoint.folder or Path(run.output.folder) / "checkpoints")


def check_same_training(old: Run, new: Run) -> None:
    """To go on, layout, length, learning rate and output may change; what decides the numbers computed may not."""
    fixed = {
        "training.global_batch": (old.training.global_batch, new.training.global_batch),
        "training.sequence": (old.training.sequence, new.training.sequence),
        "training.seed": (old.training.seed, new.training.seed),
        "training.precision": (old.training.precision, new.training.precision),
        "model": (old.model, new.model),
        "data": (old.data, new.data),
        "optimizer": (old.optimizer, new.optimizer),
    }
    for name, (before, now) in fixed.items():
        if before != now:
            pair = f"{name}={now} is not {before}," if isinstance(now, int | str) else f"{name} is not that"
            raise UserError(f"{pair} of the run in {new.output.folder}; use the same {name}, or another output.folder")


def prepare_folder(run: Run, overwrite: bool = False, resume: bool = False) -> Path:
    """Claim the run's folder before any process starts."""
    folder = Path(run.output.folder)
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite removes it; use one of them")
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output.folder={folder} is a file; use the name of a folder")
        if (folder / RUN_FILE).exists():
            if resume:
                check_same_training(load_run(folder / RUN_FILE), run)
                _remove(folder, REPORTS)  # what ended the run before is not what ends it now
            elif overwrite:
                _clear(run, folder)
            else:
                raise UserError(
                    f"output.folder={folder} already holds a run; use another folder, --resume to go on with it, "
                    f"or --overwrite to start it anew"
                )
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{RUN_FILE}.{os.getpid()}"
        aside.write_text(dump_run(run))
        shutil.move(aside, folder / RUN_FILE)
    except OSError as error:
        raise UserError(f"output.folder={folder} cannot be written: {error.strerror}; use another folder") from None
    return folder


def _clear(run: Run, folder: Path) -> None:
    for pattern in (*WRITTEN, REPORTS):
        _remove(folder, pattern)
    checkpoint_folder(run).remove()


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()
