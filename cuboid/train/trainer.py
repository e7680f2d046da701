"""The training loop of one rank."""

from __future__ import annotations

import time

import torch
from torch.distributed.checkpoint.api import CheckpointException

from cuboid.checkpoint.folder import prune
from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import save
from cuboid.data.loader import evaluation_batches, micro_batches
from cuboid.data.source import make_source, make_validation_source
from cuboid.parallel.apply import Engine, build_engine
from cuboid.spec.run import Run
from cuboid.train.evaluate import evaluate
from cuboid.train.folder import checkpoint_folder
from cuboid.train.learning_rate import learning_rate
from cuboid.train.metrics import Metrics
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import train_step


def train(run: Run, rank: int, device: torch.device, quiet: bool = False, go_on: bool = False) -> float:
    """Train to the last step, from the first or the newest checkpoint; returns the last loss, equal on all ranks."""
    torch.use_deterministic_algorithms(run.training.deterministic)
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    validation = make_validation_source(run) if run.evaluation.every else None
    replica = engine.groups.coordinates.dp
    done = resume(engine, optimizer, checkpoint_folder(run), quiet) if go_on else 0
    loss = float("nan")
    with Metrics(run, rank, quiet, done) as metrics:
        for step in range(done, run.training.steps):
            start = time.perf_counter()
            rate = learning_rate(run.learning_rate, step, run.training.steps)
            batches = micro_batches(source, run, step, replica, device)
            result = train_step(engine, optimizer, batches, rate)
            loss = result.loss
            seconds = time.perf_counter() - start
            held_out = None
            if validation is not None and (step + 1) % run.evaluation.every == 0:
                held_out = evaluate(engine, evaluation_batches(*validation, run, replica, device))
            metrics.record(step, result, rate, seconds, engine.pipeline.timing, held_out)
            if run.checkpoint.is_due(step + 1, run.training.steps):
                keep_state(engine, optimizer, step + 1)
    return loss


def keep_state(engine: Engine, optimizer: Optimizer, done: int) -> None:
    """Save; a disk that is full or gone costs a warning on every rank alike, not the training."""
    run, folder = engine.run, checkpoint_folder(engine.run)
    try:
        save(engine, optimizer, folder, done)
    except CheckpointException as error:
        if engine.groups.world.index == 0:
            reason = str(next(iter(error.failures.values()), [error])[0])
            print(f"warning: no checkpoint after step {done}: {reason}; the training goes on", flush=True)
        return
    if engine.groups.world.index == 0:
        prune(folder, run.checkpoint.keep)
