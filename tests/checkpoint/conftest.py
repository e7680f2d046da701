"""A small checkpoint by four ranks, written once for all tests that look at one or damage a copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.launch.pool import Pool
from tests.checkpoint.jobs import SMALL
from tests.parallel.cases import small_run


@pytest.fixture(scope="package")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two steps."""
    folder = tmp_path_factory.mktemp("written")
    run = small_run("dp=2,tp=2,zero=1", *SMALL)
    pool.run("tests.checkpoint.jobs:train_part", (run, str(folder), 0, 2, None), ranks=4)
    return Path(checkpoint_path(folder, 2).path)


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(written, checkpoint_path(tmp_path, 2).path))
