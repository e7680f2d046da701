"""The folder of a run: what it holds, and that it never holds two runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cuboid.errors import UserError
from cuboid.spec.run import Run, dump_run

RUN_FILE = "run.toml"
WRITTEN = ("metrics.jsonl", "timing-*.jsonl", "failure-*.txt")


def prepare_folder(run: Run, overwrite: bool = False) -> Path:
    """Claim the run's folder before any process starts."""
    folder = Path(run.output.folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output.folder={folder} is a file; use the name of a folder")
        if (folder / RUN_FILE).exists():
            if not overwrite:
                raise UserError(
                    f"output.folder={folder} already holds a run; use another folder, or --overwrite to start it anew"
                )
            for pattern in WRITTEN:
                for path in folder.glob(pattern):
                    path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{RUN_FILE}.{os.getpid()}"
        aside.write_text(dump_run(run))
        shutil.move(aside, folder / RUN_FILE)
    except OSError as error:
        raise UserError(f"output.folder={folder} cannot be written: {error.strerror}; use another folder") from None
    return folder
