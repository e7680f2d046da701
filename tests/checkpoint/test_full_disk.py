"""A full disk costs a warning: the training continues, what was kept stays whole, and later saves work again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from tests.checkpoint.full_disk import small_training

OWN_DISK = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m none "$1" && shift && "$@"']


def own_disk(folder: Path) -> list[str]:
    """What a command begins with that gets a disk of two megabytes; empty where the system gives nobody one."""
    command = [*OWN_DISK, "sh", str(folder)]
    try:
        works = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    return command if works else []


@pytest.mark.parametrize("how", ["fill", "limit"])
def test_the_training_goes_on_and_what_was_kept_is_whole(pool: Pool, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    prefix = own_disk(folder) if how != "limit" else []
    # Without a disk of its own a file that may not grow is the same to the training: the system refuses the write.
    command = [*prefix, sys.executable, "-m", "tests.checkpoint.full_disk", str(folder), how if prefix else "limit"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout.splitlines()[-1])
    pool.run("tests.training.cases:train_rank", (small_training(tmp_path / "whole", 7),), ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    assert (seen["full_loss"], seen["loss"]) == (losses[4], losses[6])
    assert (seen["kept"], seen["damaged"], seen["left"]) == (2, [], [])
    assert (seen["newest"], seen["losses"]) == (7, losses)
    reason = "No space left on device" if prefix else "File too large"
    for step in (3, 4, 5):
        assert f"warning: no checkpoint after step {step}: " in finished.stderr
    assert reason in finished.stderr


def test_rows_that_the_disk_does_not_take_are_written_later(tmp_path: Path) -> None:
    with Pool() as pool:
        [(full, end)] = pool.run("tests.checkpoint.full_disk:append", (str(tmp_path / "rows.jsonl"),), ranks=1)
    assert full == '{"step": 1}\n{"step'
    assert end == '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "checkpoints": [6]}\n'
