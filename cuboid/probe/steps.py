"""Real steps of small models in one process, timed while all ranks do the same."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import apply_update, compute_gradients


def step_actions(run: Run) -> tuple[Callable[[], object], Callable[[], object]]:
    """The gradients of one batch, and the update with them."""
    device = torch.device("cpu")
    engine = build_engine(run, 0, device)
    optimizer = Optimizer(engine, run.optimizer)
    batches = micro_batches(make_source(run), run, 0, 0, device)
    pending = compute_gradients(engine, batches)
    return lambda: compute_gradients(engine, batches), lambda: apply_update(engine, optimizer, pending, 1e-5)
