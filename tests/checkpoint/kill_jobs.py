"""What the processes do that are killed; apart from the tests, so that many of them start without what tests import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cuboid.spec.run import Run
from cuboid.training.run_folder import prepare_folder
from cuboid.training.trainer import train
from tests.checkpoint.events import Death, Event, Watcher

RANKS = 4


def life(rank: int, run: Run, begin: int, deaths: dict[int, Death], mark: str) -> tuple[list[Event], dict[str, int]]:
    """Train from the newest checkpoint, which is of step `begin`, to the end of the run or of this rank."""
    processes: list[Any] = [None] * RANKS
    dist.all_gather_object(processes, os.getpid())
    others = [process for process in processes if process != os.getpid()]
    watcher = Watcher(run.output.folder, begin, deaths.get(rank), mark, others)
    watcher.install()
    train(run, rank, torch.device("cpu"), quiet=True)
    return watcher.events, watcher.missed()


def prepare(rank: int, run: Run, overwrite: bool, death: Death | None, mark: str) -> tuple[list[Event], dict[str, int]]:
    watcher = Watcher(str(Path(run.output.folder).parent), 0, death, mark, [])
    watcher.install()
    prepare_folder(run, overwrite)
    return watcher.events, watcher.missed()
