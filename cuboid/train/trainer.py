"""The training loop of one rank."""

from __future__ import annotations

import time
from collections import deque

import torch

from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import deadline_group
from cuboid.checkpoint.saver import Saver
from cuboid.checkpoint.start import start
from cuboid.data.loader import evaluation_batches, micro_batches
from cuboid.data.source import make_source, make_validation_source
from cuboid.parallel.apply import build_engine
from cuboid.spec.run import Run
from cuboid.train.communication import CommunicationLog
from cuboid.train.evaluate import evaluate
from cuboid.train.folder import checkpoint_folder
from cuboid.train.learning_rate import learning_rate
from cuboid.train.metrics import Metrics
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import PendingStep, start_step


def train(run: Run, rank: int, device: torch.device, quiet: bool = False) -> float:
    """Train to the last step, from the newest checkpoint of the run or the first step; returns the last loss, equal on
    all ranks."""
    torch.use_deterministic_algorithms(run.training.deterministic)
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    validation = make_validation_source(run) if run.evaluation.every else None
    replica = engine.groups.coordinates.dp
    folder, group = checkpoint_folder(run), deadline_group(run.checkpoint.timeout_seconds)
    done = resume(engine, optimizer, folder, group, quiet)
    saver = Saver(engine, optimizer, folder, group) if run.checkpoint.every else None
    if run.training.start_from and not done:
        start(engine, run.training.start_from, quiet)
    loss = float("nan")
    under_way: deque[tuple[int, float, PendingStep]] = deque()
    with Metrics(run, rank, quiet, done) as metrics, CommunicationLog(run, rank, engine.ledger) as communication:
        clock = time.perf_counter()
        for step in range(done, run.training.steps):
            rate = learning_rate(run.learning_rate, step, run.training.steps)
            batches = micro_batches(source, run, step, replica, device)
            pending = start_step(engine, optimizer, batches, rate, saver.before_update if saver else None)
            under_way.append((step, rate, pending))
            communication.record(step)
            evaluates = validation is not None and (step + 1) % run.evaluation.every == 0
            saves = saver is not None and run.checkpoint.is_due(step + 1, run.training.steps)
            # A GPU computes a step while the host prepares the next, and waits for nothing between them.
            at_once = device.type == "cpu" or evaluates or saves or step + 1 == run.training.steps
            while len(under_way) > (0 if at_once else 1):
                number, its_rate, pending = under_way.popleft()
                result = pending.result()
                loss, seconds = result.loss, time.perf_counter() - clock
                held_out = None
                if evaluates and validation is not None and number == step:
                    held_out = evaluate(engine, evaluation_batches(*validation, run, replica, device))
                reports = saver.reports() if saver else []
                metrics.record(number, result, its_rate, seconds, engine.pipeline.timing, held_out, reports)
                clock = time.perf_counter()
            if saves and saver is not None:
                saver.save(step + 1)  # after the row of this step, which a resumed run will not write again
                clock = time.perf_counter()
        if saver:
            metrics.add_saves(saver.finish())
    return loss
