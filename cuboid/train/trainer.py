"""The training of one rank: set-up, steps, evaluation, saves, end."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

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
from cuboid.train.memory import MemoryLog
from cuboid.train.metrics import Metrics
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import PendingStep, start_step


def train(run: Run, rank: int, device: torch.device, quiet: bool = False) -> float:
    """Train to the last step, from the newest checkpoint of the run or the first step; returns the last loss, equal on
    all ranks."""
    return Trainer(run, rank, device, quiet).train()


@dataclass(frozen=True)
class Started:
    """A step whose result is on its way from the device."""

    step: int
    learning_rate: float
    pending: PendingStep


class Trainer:
    """Every rank makes one and calls the same methods in the same order."""

    def __init__(self, run: Run, rank: int, device: torch.device, quiet: bool = False) -> None:
        """Set-up: after it the state is that of the newest checkpoint, or of the first step."""
        torch.use_deterministic_algorithms(run.training.deterministic)
        self.run, self.device = run, device
        self.memory = MemoryLog(run, rank, device)
        self.engine = build_engine(run, rank, device)
        self.optimizer = Optimizer(self.engine, run.optimizer)
        self.source = make_source(run)
        self.validation = make_validation_source(run) if run.evaluation.every else None
        folder, group = checkpoint_folder(run), deadline_group(run.checkpoint.timeout_seconds)
        self.done = resume(self.engine, self.optimizer, folder, group, quiet)
        self.saver = Saver(self.engine, self.optimizer, folder, group) if run.checkpoint.every else None
        if run.training.start_from and not self.done:
            start(self.engine, run.training.start_from, quiet)
        self.metrics = Metrics(run, rank, quiet, self.done)
        self.communication = CommunicationLog(run, rank, self.engine.ledger)
        self.loss = float("nan")
        self._under_way: deque[Started] = deque()
        self._clock = 0.0

    def train(self) -> float:
        with self.metrics, self.communication, self.memory:
            self._clock = time.perf_counter()
            while self.done < self.run.training.steps:
                self._start_step()
                self.done += 1
                # A GPU computes a step while the host prepares the next, and waits for nothing between them.
                at_once = self.device.type == "cpu" or self._evaluates or self._saves or self._is_last
                at_once = at_once or self.run.output.keep_timing  # the next step writes over the times of this one
                while len(self._under_way) > (0 if at_once else 1):
                    self._finish_step(self._under_way.popleft())
                if self._saves:
                    self._save()  # after the row of this step, which a resumed run will not write again
            self._finish()
        return self.loss

    @property
    def _is_last(self) -> bool:
        return self.done == self.run.training.steps

    @property
    def _evaluates(self) -> bool:
        return self.validation is not None and self.done % self.run.evaluation.every == 0

    @property
    def _saves(self) -> bool:
        return self.saver is not None and self.run.checkpoint.is_due(self.done, self.run.training.steps)

    @property
    def _replica(self) -> int:
        return self.engine.groups.coordinates.dp

    def _start_step(self) -> None:
        rate = learning_rate(self.run.learning_rate, self.done, self.run.training.steps)
        batches = micro_batches(self.source, self.run, self.done, self._replica, self.device)
        before_update = self.saver.before_update if self.saver else None
        pending = start_step(self.engine, self.optimizer, batches, rate, before_update)
        self._under_way.append(Started(self.done, rate, pending))
        self.communication.record(self.done)

    def _finish_step(self, started: Started) -> None:
        """Wait for a step's numbers and write them down, with those of an evaluation that follows it."""
        result = started.pending.result()
        self.loss, seconds = result.loss, time.perf_counter() - self._clock
        held_out = self._evaluate() if self._evaluates and started.step + 1 == self.done else None
        reports = self.saver.reports() if self.saver else []
        timing = self.engine.pipeline.timing
        self.metrics.record(started.step, result, started.learning_rate, seconds, timing, held_out, reports)
        self.memory.record(started.step, self.engine, self.optimizer)
        self._clock = time.perf_counter()

    def _evaluate(self) -> float:
        assert self.validation is not None
        return evaluate(self.engine, evaluation_batches(*self.validation, self.run, self._replica, self.device))

    def _save(self) -> None:
        assert self.saver is not None
        self.saver.save(self.done)
        self._clock = time.perf_counter()

    def _finish(self) -> None:
        if self.saver:
            self.metrics.add_saves(self.saver.finish())
