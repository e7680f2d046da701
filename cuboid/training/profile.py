"""Traces of chosen steps, and what memory held in them, in the folder `profile` of the run.

trace-RANK.json.gz      open it in ui.perfetto.dev (or chrome://tracing); regions have the names of layers, passes
                        and waits
memory-RANK.json        bytes by kind at the fullest moment
snapshot-RANK.pickle    on a GPU: what was allocated, where and when; open it in pytorch.org/memory_viz
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from cuboid.console import say
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.telemetry.profiler_regions import REGIONS
from cuboid.training.callbacks import Callback
from cuboid.training.memory import Tally, held, left_by_autograd, resident_peak, storages

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer

FOLDER = "profile"
TRACES, SNAPSHOTS, MEMORY = "trace-*.json.gz", "snapshot-*.pickle", "memory-*.json"
MOST_PASSES = 1000
"""Layers × micro-batches in a trace: some hundred thousand events, some tens of megabytes. A step is never cut."""
MOST_ALLOCATIONS = 200_000
"""In a snapshot: the latest ones."""


class Profile(Callback):
    """Does something in those that are traced."""

    def __init__(self, run: Run, rank: int, device: torch.device) -> None:
        """Made before the model, whose allocations a snapshot shows too."""
        self._run, self._rank, self._device = run, rank, device
        self._window = range(0)
        self._profiler: profile | None = None
        self._tally: Tally | None = None
        self._records = run.profile.traces(rank) and run.profile.memory and device.type == "cuda"
        if self._records:
            # Not where memory is freed: that happens while an exception passes too, as recomputation ends by one, and
            # looking at Python's frames then loses the exception.
            torch.cuda.memory._record_memory_history(context="alloc", max_entries=MOST_ALLOCATIONS, stacks="python")

    def __exit__(self, *_: object) -> None:
        """A training that fails in a traced step leaves what it traced: a profiler must not outlive it."""
        if self._profiler is not None:
            REGIONS.end()
            with suppress(Exception):  # what made the training fail is what is told
                self._profiler.stop()
            self._profiler = None

    def on_start(self, trainer: Trainer) -> None:
        if not self._run.profile.traces(self._rank):
            return
        self._engine, self._optimizer = trainer.engine, trainer.optimizer
        layers = sum(len(stage.segments) for stage in self._engine.pipeline.stages.values())
        # Events of a trace grow with layers × micro-batches; viewers fail before disks do.
        most = max(1, MOST_PASSES // (layers * self._run.micro_batches))
        self._window = self._run.profile.window(trainer.done, self._run.training.steps, most)
        if self._window and most < self._run.profile.steps and self._rank == 0:
            say(f"note: {len(self._window)} of profile.steps={self._run.profile.steps} are traced, to keep files small")

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        """Whether the trace ends with that step."""
        return bool(self._window) and step == self._window[-1]

    def around_step(self, trainer: Trainer, step: int) -> AbstractContextManager[object]:
        if not self._window or step not in range(self._window[0] - 1, self._window[-1] + 1):
            return nullcontext()
        if self._profiler is None:
            self._start(warm_up=self._window[0] - step)
        # In the step before those traced: a dispatch mode slows every operation, and sees nothing of compiled ones.
        if step == self._window[0] - 1 and not self._engine.compiled and self._device.type == "cpu":
            known = storages(self._engine.units, self._optimizer)
            self._tally = Tally(known, lambda: sum(held(self._engine.units, self._optimizer).values()))
            return self._tally
        return REGIONS.step(step) if step in self._window else nullcontext()

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if self._profiler is None:
            return
        closes = self.waits_for(trainer, step)
        if closes:
            HEARTBEAT.enter("set-up")  # no step waits for this as long as for a step
            REGIONS.end()
            self._profiler.add_metadata("cuboid", f"{self._run.model.name}, rank {self._rank} of {self._run.layout}")
        self._profiler.step()  # which writes the trace after the last one
        if step + 1 == self._window[0]:
            REGIONS.begin()
        if closes:
            self._profiler = None
            self._write_memory()
            trainer.start_clock()

    def _start(self, warm_up: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a short run may have no step to warm up in
            steps = schedule(wait=0, warmup=warm_up, active=len(self._window), repeat=1)
        self._profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write_trace)
        self._profiler.start()
        # Else `on_step_end` begins them, after the steps in which the profiler warms up.
        if not warm_up:
            REGIONS.begin()

    def _write_trace(self, profiler: profile) -> None:
        self._write(TRACES, lambda path: profiler.export_chrome_trace(str(path)))

    def _write_memory(self) -> None:
        table = {"rank": self._rank, "layout": str(self._run.layout), "bytes": self._memory()}
        self._write(MEMORY, lambda path: path.write_text(json.dumps(table) + "\n"))
        if self._records:
            write_snapshot(self._run, self._rank)
            end_history()
            self._records = False

    def _memory(self) -> dict[str, int]:
        """By kind at the fullest moment; activations are all that lived for a part of a step. On a CPU they
        are counted where nothing is compiled, in a step before those traced; else they are among the others."""
        known = held(self._engine.units, self._optimizer)
        if self._device.type == "cuda":
            # Some gradients are autograd's own until a unit takes them over.
            known["gradients"] += left_by_autograd(self._engine.units)
            peak = torch.cuda.max_memory_allocated(self._device)
            return {
                **known,
                "activations": max(0, peak - sum(known.values())),
                "other": torch.cuda.max_memory_reserved(self._device) - peak,
            }
        if self._tally is not None:
            known["activations"] = self._tally.beside
        return {**known, "other": max(0, resident_peak() - sum(known.values()))}

    def _write(self, pattern: str, write: Callable[[Path], object]) -> None:
        write_whole(_path(self._run, self._rank, pattern), write)


def history_is_recorded(device: torch.device) -> bool:
    """Whether a snapshot would tell where memory was allocated."""
    return any(torch.cuda.memory._snapshot(device)["device_traces"])


def end_history() -> None:
    """What it holds of Python must be gone before Python is."""
    torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(run: Run, rank: int) -> Path:
    path = _path(run, rank, SNAPSHOTS)
    write_whole(path, lambda aside: torch.cuda.memory._dump_snapshot(str(aside)))  # type: ignore[no-untyped-call]
    return path


def _path(run: Run, rank: int, pattern: str) -> Path:
    return Path(run.output.folder) / FOLDER / pattern.replace("*", f"{rank:05d}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Under its name once it is whole; a full disk ends no training."""
    aside = path.with_name(f"writing-{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)
        write(aside)
        aside.replace(path)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror or error}; the training continues", as_warning=True)
