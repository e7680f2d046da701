"""Jobs that run on the ranks of the pool, and short runs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from cuboid.generate.samples import Sampler
from cuboid.spec.run import Run, build_run
from cuboid.training.trainer import train


def short_run(layout: str, folder: str, *overrides: str, model: str = "tiny-llama") -> Run:
    """Half of the catalog's layers: a step takes as long as it has layers and micro-batches."""
    table = {
        "model": model,
        "layout": layout,
        "training": {"steps": 20, "global_batch": 8, "sequence": 16, "device": "cpu"},
        "learning_rate": {"peak": 2e-3, "warmup_steps": 2},
        "output": {"folder": folder},
    }
    return build_run(table, ["model.layers=4", *overrides])


def train_rank(rank: int, run: Run) -> float:
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    return train(run, rank, torch.device("cpu"), quiet=True, make_sampler=Sampler).loss


def draw_and_train(rank: int, run: Run, drawn: int) -> float:
    """After so many random numbers that have nothing to do with the run."""
    torch.rand(drawn)
    return train_rank(rank, run)


def imported(rank: int, run: Run) -> set[str]:
    """What a training imports beyond what its process began with."""
    before = set(sys.modules)
    train_rank(rank, run)
    return set(sys.modules) - before
