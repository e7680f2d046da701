"""The folder of a run: what it holds, and that it never holds two runs."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

from cuboid.checkpoint.folder import checkpoints, clear, newest_whole, step_of
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.memory.folder import IDENTITY, forget, newest_in_memory
from cuboid.data.opened import data_identity
from cuboid.errors import UserError
from cuboid.spec.run import Run, build_run, dump_run, load_run
from cuboid.training.rows import last_step

RUN_FILE = "run.toml"
BACKEND = "backend.json"
"""What carries the collectives, on how many GPUs; written by rank 0 when all have joined."""
EXPERTS = "experts.jsonl"
"""The load of every expert of a mixture, over time."""
WRITTEN = (
    BACKEND,
    IDENTITY,
    "metrics.jsonl",
    EXPERTS,
    "timing-*.jsonl",
    "communication-*.jsonl",
    "memory-*.jsonl",
    "failures.jsonl",
    "fault-*.json",
    "hang-*",
    "flight-*",
    "goodput.json",
    "ranks-*.jsonl",
    "bad_steps.jsonl",
    "tracked.jsonl",
    "samples.jsonl",
    "profile",
)
REPORTS = "failure-*.txt"


def checkpoint_folder(run: Run) -> Location:
    return locate(run.checkpoint.folder or Path(run.output.folder) / "checkpoints")


def newest_kept(run: Run) -> int:
    """Steps of the newest state there is to continue from, on disk or in this node's memory."""
    on_disk = max((step_of(path) for path in checkpoints(checkpoint_folder(run))), default=0)
    return max(on_disk, newest_in_memory(run))


def last_row(run: Run) -> int:
    """The last step that the run's own rows tell of."""
    return last_step(Path(run.output.folder) / "metrics.jsonl")


def check_same_training(old: Run, new: Run) -> None:
    """To continue, layout, length, learning rate and output may change; what decides the numbers computed may not."""
    fixed = {
        "training.global_batch": (old.training.global_batch, new.training.global_batch),
        "training.sequence": (old.training.sequence, new.training.sequence),
        "training.seed": (old.training.seed, new.training.seed),
        "training.start_from": (old.training.start_from, new.training.start_from),
        "training.precision": (old.training.precision, new.training.precision),
        "model": (old.model, new.model),
        "data": (old.data, new.data),
        "optimizer": (old.optimizer, new.optimizer),
    }
    for name, (before, now) in fixed.items():
        if before != now:
            pair = f"{name}={now} is not {before}," if isinstance(now, int | str) else f"{name} is not that"
            raise UserError(
                f"{pair} of the run in {new.output.folder}; use the same {name}, another output.folder, or --overwrite "
                f"to start anew"
            )


def prepare_folder(run: Run, overwrite: bool = False) -> str:
    """Claim the run's folder before any process starts. Another training there is refused by name, the same one goes
    on; returns what there is to say of its past."""
    folder = Path(run.output.folder)
    said = ""
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output.folder={folder} is a file; use the name of a folder")
        if overwrite:
            _clear(run, folder)
        else:
            said = _check_past(run, folder)
            forget_reports(run)
        if overwrite or not run.checkpoint.memory_every:
            forget(run)
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{RUN_FILE}.{os.getpid()}"
        aside.write_text(dump_run(run))
        shutil.move(aside, folder / RUN_FILE)
    except OSError as error:
        raise UserError(f"output.folder={folder} cannot be written: {error.strerror}; use another folder") from None
    return said


def forget_reports(run: Run) -> None:
    """What ended the run before is not what ends it now."""
    _remove(Path(run.output.folder), REPORTS)


def _check_past(run: Run, folder: Path) -> str:
    """Refuse what the folder, or the checkpoints there are, cannot continue with."""
    known = (folder / RUN_FILE).exists()
    if known:
        check_same_training(load_run(folder / RUN_FILE), run)
    _, manifest, _ = newest_whole(checkpoint_folder(run), contents=False)
    if manifest is None:
        if newest_in_memory(run):
            return ""
        return f"{folder} has no whole checkpoint: starting anew from step 0" if known else ""
    check_same_training(build_run(tomllib.loads(manifest.run)), run)
    if manifest.data != data_identity(run):
        sources = ", ".join(run.data.sources)
        raise UserError(
            f"data.source={sources} holds other samples than it did when step {manifest.step} was saved in "
            f"{checkpoint_folder(run)}; use the same data, another output.folder, or --overwrite"
        )
    return ""


def _clear(run: Run, folder: Path) -> None:
    for pattern in (*WRITTEN, REPORTS):
        _remove(folder, pattern)
    clear(checkpoint_folder(run))


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
