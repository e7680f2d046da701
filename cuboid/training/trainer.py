"""The training of one rank: set-up, steps, evaluation, saves, end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cuboid.checkpoint.save import SaveReport
from cuboid.checkpoint.state import seed_generators
from cuboid.console import say
from cuboid.data.assignment import Assignment
from cuboid.data.loader import assigned, evaluation_batches, micro_batches
from cuboid.data.source import make_source, make_validation_source
from cuboid.errors import RankError, UserError
from cuboid.islands.outer import OuterState
from cuboid.islands.sync import Site
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.parallelize import build_engine
from cuboid.resilience.faults import strikes
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.bad_steps import BadSteps
from cuboid.training.callbacks import Callback, load_callbacks
from cuboid.training.checkpointer import Checkpointer
from cuboid.training.checks.callback import Checks
from cuboid.training.communication_log import CommunicationLog
from cuboid.training.cuda_graphs import CapturedPasses, make_passes
from cuboid.training.device_progress import device_progress
from cuboid.training.islands import IslandRounds
from cuboid.training.layer_norms import LayerNorms
from cuboid.training.learning_rate import learning_rate
from cuboid.training.memory import MemoryLog, exhaust
from cuboid.training.metrics import Metrics
from cuboid.training.optimizer import Optimizer
from cuboid.training.profile import Profile
from cuboid.training.replicas import flip_bit
from cuboid.training.samples import MakeSampler, Samples
from cuboid.training.step import LeavesOut, PendingStep, evaluate, run_passes, start_step


@dataclass(frozen=True)
class Outcome:
    """How a training ended; the same on all ranks."""

    loss: float
    """Of the last step."""
    preempted: bool = False
    """Asked to stop before the last step: the same command continues."""
    saved: int = 0
    """Steps of the newest checkpoint."""
    seconds: float = 0.0
    """How long it took to save what was done, once all ranks knew that they are to stop."""


def train(
    run: Run,
    rank: int,
    device: torch.device,
    quiet: bool = False,
    asked: Callable[[], bool] = lambda: False,
    make_sampler: MakeSampler | None = None,
    ready: Callable[[], None] | None = None,
    site: Site | None = None,
) -> Outcome:
    """Train to the last step, from the newest checkpoint of the run or the first step. `asked`: whether this rank was
    asked to stop; if any was, all save and stop at the next step. `make_sampler`: for a run with `samples.every`.
    `ready` is called when all is set up, before a step is written down; default: the run's folder is made. `site`: of
    an island."""
    with device_progress(device):
        trainer = Trainer(run, rank, device, quiet, asked, make_sampler, site)
        if ready is None:
            Path(run.output.folder).mkdir(parents=True, exist_ok=True)
        else:
            ready()
        return trainer.train()


@dataclass(frozen=True)
class Started:
    """A step whose result is on its way from the device."""

    step: int
    learning_rate: float
    pending: PendingStep
    assignment: Assignment | None


class Trainer:
    """Every rank makes one and calls the same methods in the same order."""

    def __init__(
        self,
        run: Run,
        rank: int,
        device: torch.device,
        quiet: bool = False,
        asked: Callable[[], bool] = lambda: False,
        make_sampler: MakeSampler | None = None,
        site: Site | None = None,
    ) -> None:
        """Set-up: after it the state is that of the newest checkpoint, or of the first step."""
        if run.samples.every and make_sampler is None:
            raise UserError(f"samples.every={run.samples.every} needs make_sampler; pass one, or use every=0")
        if (
            torch.are_deterministic_algorithms_enabled() != run.training.deterministic
        ):  # setting it imports the compiler
            torch.use_deterministic_algorithms(run.training.deterministic)
        seed_generators(run.training.seed, rank)
        self.run, self.rank, self.device = run, rank, device
        own = load_callbacks(run.training.callbacks)
        # Before the engine: one notes what memory held without the model, the other records its allocations.
        memory, profile = MemoryLog(run, rank, device), Profile(run, rank, device)
        # Without weights: the checkpointer reads them, or draws them where there is nothing to read.
        self.engine = build_engine(run, rank, device, draw=False)
        self.optimizer = Optimizer(self.engine, run.optimizer)
        outer = OuterState(self.engine) if site is not None else None
        if outer is not None:
            self.optimizer.beside = outer.state
        self._norms = LayerNorms(self.engine) if run.output.layer_norms else None
        self._passes = make_passes(self.engine, self.optimizer, partial(run_passes, self.engine))
        if self.optimizer.host_bytes and rank == 0 and not quiet:
            say(f"offload=true: {self.optimizer.host_bytes / 2**30:.2f} GiB of optimizer state a rank in host memory")
        self.source = make_source(run)
        self.validation = make_validation_source(run) if run.evaluation.every else None
        self.checkpointer = Checkpointer(self.engine, self.optimizer, rank, quiet)
        self.done = self.checkpointer.found
        self.rounds: IslandRounds | None = None
        if outer is not None and site is not None:
            self.rounds = IslandRounds(self.engine, outer, site, self.done, quiet)
        # Those that others rely on come first: a row is written before a checkpoint, which a resumed run continues
        # from without writing that row again, and nothing is kept of replicas that differ.
        self.callbacks: list[Callback] = [
            Metrics(run, rank, quiet, self.done),
            CommunicationLog(run, rank, self.engine.ledger),
            memory,
            profile,
            BadSteps(self.engine, self.source, self.done),
            *([Checks(self.engine, self.optimizer, self.source, self.done)] if run.checks.every else []),
            *([] if self.rounds is None else [self.rounds]),
            self.checkpointer,
        ]
        if make_sampler and run.samples.every:
            self.callbacks.append(Samples(make_sampler(self.engine, quiet)))
        self.callbacks += own
        self.loss = float("nan")
        self._under_way: deque[Started] = deque()
        self._clock = 0.0
        self._before: PendingStep | None = None
        self._asked = asked
        self.stops = False
        """Whether all ranks are to stop."""

    def train(self) -> Outcome:
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback)
            # Somebody may have asked to stop during set-up, which takes minutes for a large model.
            self._agree()
            if self.run.resilience.goes_back and not self.done:
                self.save()  # so that there is something to go back to
            for callback in self.callbacks:
                callback.on_start(self)
            self.start_clock()
            while self.done < self.run.training.steps and not self.stops:
                with ExitStack() as around:
                    for callback in self.callbacks:
                        around.enter_context(callback.around_step(self, self.done + 1))
                    self._start_step()
                self.done += 1
                # A GPU computes a step while the host prepares the next, and waits for nothing between them. Whatever
                # reads or changes the state after this very step waits for it.
                at_once = self.device.type == "cpu" or self._evaluates or self._is_last
                at_once = at_once or any(callback.waits_for(self, self.done) for callback in self.callbacks)
                at_once = at_once or self.run.output.keep_timing  # the next step writes over the times of this one
                while len(self._under_way) > (0 if at_once else 1):
                    if not self._finish_step(self._under_way.popleft()):
                        break
                else:
                    for callback in self.callbacks:
                        callback.on_step_end(self, self.done)
            return self._finish()

    @property
    def _is_last(self) -> bool:
        return self.done == self.run.training.steps

    @property
    def _evaluates(self) -> bool:
        return self.validation is not None and self.done % self.run.evaluation.every == 0

    @property
    def _replica(self) -> int:
        return self.engine.groups.coordinates.dp

    def _start_step(self) -> None:
        HEARTBEAT.enter("step", self.done + 1)
        HEARTBEAT.do("data")
        if strikes(HEARTBEAT, "flip"):
            flip_bit(self.optimizer.optimizer_shards[-1].kept)
        if strikes(HEARTBEAT, "oom"):
            exhaust(self.device)
        # Step and position alone decide the samples: there is no state of a loader to save or to advance.
        rate = learning_rate(self.run.learning_rate, self.done, self.run.training.steps)
        batch = self.engine.course.batch(self.done) if self.rounds is None else self.rounds.next_batch(self.done)
        batches = micro_batches(self.source, self.run, batch, self._replica, self.device)
        HEARTBEAT.do("")
        judges = [judge for callback in self.callbacks if (judge := callback.judge(self, self.done + 1))]
        norms = self._norms if self.run.output.measures_layers(self.done + 1, self.run.training.steps) else None
        before, passes = self.checkpointer.before_update, self._passes
        judge = _first_reason(judges) if judges else None
        pending = start_step(self.engine, self.optimizer, batches, rate, before, self._asked(), judge, passes, norms)
        self._under_way.append(Started(self.done, rate, pending, assigned(self.source, self.run, batch)))

    def _finish_step(self, started: Started) -> bool:
        """Wait for a step's numbers and write them down, with those of an evaluation that follows it. False if the run
        goes back instead."""
        # Waits for the device. On a GPU the next step is usually queued behind this one, so the device does not.
        result, step = started.pending.result(), started.step + 1
        seconds = started.pending.seconds_after(self._before) or time.perf_counter() - self._clock
        self.stops = self.stops or result.stops
        for callback in self.callbacks:
            judged = callback.on_result(self, step, result, started.pending)
            if judged is None:
                return False
            result = judged
        self.loss = result.loss
        evaluates = self._evaluates and step == self.done
        held_out = self._evaluate() if evaluates else None
        self._tell_saved(self.checkpointer.reports(seconds))
        rate, shown = started.learning_rate, started.assignment
        result = replace(result, learning_rate=rate, seconds=seconds, validation_loss=held_out, assignment=shown)
        for callback in self.callbacks:
            callback.on_step(self, step, result)
            if held_out is not None:
                callback.on_evaluation(self, step, held_out)
        self.start_clock()
        # A step's time runs from the end of the one before, unless something else came between.
        self._before = None if evaluates else started.pending
        return True

    @contextmanager
    def kernel_by_kernel(self) -> Iterator[None]:
        """A step that is started inside of this is no CUDA graph, so that callbacks may look into it."""
        with self._passes.opened() if isinstance(self._passes, CapturedPasses) else nullcontext():
            yield

    def start_clock(self) -> None:
        """What comes now is no part of a step before."""
        self._clock = time.perf_counter()
        self._before = None

    def roll_back(self, step: int) -> None:
        """To the newest checkpoint, from which the run resumes. `step`: which made that necessary."""
        HEARTBEAT.enter("set-up")
        # Steps queued behind the bad one read weights that are about to be replaced: wait for them, use none of them.
        for started in self._under_way:
            started.pending.result()
        self._under_way.clear()
        self._settle_saves()  # the save in flight may become the newest checkpoint
        if not self.checkpointer.can_go_back:
            raise RankError(f"step {step} is bad and no checkpoint could be written to go back to")
        self.done = self.checkpointer.go_back()
        for callback in self.callbacks:
            callback.on_rollback(self, self.done)
        self.start_clock()

    def _evaluate(self) -> float | None:
        """None if it was cut short, or did not begin, because all are to stop."""
        assert self.validation is not None
        if self.stops:
            return None
        HEARTBEAT.enter("evaluation")
        batches = evaluation_batches(*self.validation, self.run, self._replica, self.device)
        if not self.run.evaluation.average:
            return evaluate(self.engine, batches, self._agree)
        self.checkpointer.before_update()  # a save may still copy what is about to change
        with self.optimizer.averaged():
            return evaluate(self.engine, batches, self._agree)

    def save(self) -> None:
        HEARTBEAT.enter("save")
        if self.rounds is not None:
            self.rounds.settle()
        self.checkpointer.save(self.done)
        for callback in self.callbacks:
            callback.on_save(self, self.done)
        self._agree()
        self.start_clock()

    def _agree(self) -> bool:
        """Whether some rank was asked to stop. Every rank calls this, where the next step's own sum is far."""
        if self.checkpointer.saver is not None and not self.stops:
            # A signal may reach some ranks only. A sum tells all of them at one place, so that all stop at one step.
            ranks = torch.tensor(float(self._asked()), device=self.device)
            self.stops = all_reduce(ranks, self.engine.groups.world).item() > 0
            if self.engine.ledger is not None:
                self.engine.ledger.take()  # no part of a step
        return self.stops

    def _finish(self) -> Outcome:
        """What was done is kept: all steps, or as many as were done when somebody asked to stop."""
        start = time.perf_counter()
        while self._under_way:
            self._finish_step(self._under_way.popleft())
        preempted = self.done < self.run.training.steps
        # What was saved at this step already need not be saved twice within the grace period.
        if preempted and self.checkpointer.last_save != self.done:
            self.save()
        HEARTBEAT.enter("finish")
        kept = self._settle_saves()
        if self.checkpointer.copies is not None:
            self.checkpointer.copies.forget(kept)
        for callback in self.callbacks:
            callback.on_end(self)
        return Outcome(self.loss, preempted, self.checkpointer.saved, time.perf_counter() - start)

    def _settle_saves(self) -> bool:
        """Wait for what is being saved; whether all of it is."""
        reports, kept = self.checkpointer.settle()
        self._tell_saved(reports)
        return kept

    def _tell_saved(self, saves: list[SaveReport]) -> None:
        if saves:
            for callback in self.callbacks:
                callback.on_saved(self, saves)


def _first_reason(judges: list[LeavesOut]) -> LeavesOut:
    return lambda result: next((reason for judge in judges if (reason := judge(result))), "")
