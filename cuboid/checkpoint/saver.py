"""Saves while the training goes on: the state is copied aside, and a thread writes it and publishes the checkpoint."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cuboid.checkpoint.folder import checkpoint_path, prune, sweep
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import Manifest
from cuboid.checkpoint.save import deadline_group, describe, kept_state, write
from cuboid.checkpoint.staging import Staging
from cuboid.checkpoint.state import Moments
from cuboid.data.opened import data_identity
from cuboid.parallel.apply import Engine
from cuboid.parallel.collectives import all_reduce
from cuboid.say import say

GRACE = 2.0
"""Seconds by which a save's own deadline comes before that of whoever waits for it, so that it can say why."""


@dataclass(frozen=True)
class SaveReport:
    """How a save ended."""

    step: int
    stall_seconds: float
    """How long the training waited for it."""
    write_seconds: float
    """From the state copied to the checkpoint published."""
    bytes: int
    """Of all ranks."""
    warning: str = ""
    """What went wrong, as a sentence; empty if nothing did."""


class Saver:
    """One save is in flight at a time. A save that fails costs a warning, and leaves the earlier checkpoints alone."""

    def __init__(
        self, engine: Engine, optimizer: Moments, folder: Location, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group` is of all ranks and used by nobody else, from `deadline_group`; every rank calls this."""
        self._engine, self._optimizer, self._folder = engine, optimizer, folder
        self._spec = engine.run.checkpoint
        self._group = group
        self._group_works = True
        # Rank 0 writes the manifest: the others need not look at the data to say which it is.
        self._data = data_identity(engine.run) if engine.groups.world.index == 0 else ""
        state = kept_state(engine, optimizer)
        self._staging = Staging(state, engine.device)
        own = torch.tensor(self._staging.content.nbytes, device=engine.device)
        self._bytes = int(all_reduce(own, engine.groups.world))
        self._thread: threading.Thread | None = None
        self._step = 0
        self._started = 0.0
        self._stall = 0.0
        self._result: tuple[float, int, str] | None = None
        self._reports: list[SaveReport] = []

    def save(self, step: int) -> None:
        """Every rank calls this after `step` steps. Returns when the state is copied, or on a GPU being copied."""
        start = time.perf_counter()
        if self._thread is not None and self._thread.is_alive() and self._engine.groups.world.index == 0:
            say(f"the training waits for the checkpoint after step {self._step} to be written", as_warning=True)
        stuck = not self._settle()
        stuck_ranks, broken_groups = self._count(stuck, not self._group_works)
        if stuck_ranks:
            warning = f"no checkpoint after step {step}: that after step {self._step} is not written {self._deadline}"
            self._reports.append(SaveReport(step, time.perf_counter() - start, 0.0, 0, warning))
            return
        if broken_groups:
            self._group, self._group_works = deadline_group(self._spec.timeout_seconds), True
        manifest = describe(self._engine, self._optimizer, step, self._data)
        self._staging.fill(kept_state(self._engine, self._optimizer))
        self._step, self._started, self._result = step, time.perf_counter(), None
        self._thread = threading.Thread(target=self._write, args=(manifest,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._spec.asynchronous:
            self._thread.join(self._spec.timeout_seconds + GRACE)
        self._stall = time.perf_counter() - start

    @property
    def _deadline(self) -> str:
        return f"within checkpoint.timeout_seconds={self._spec.timeout_seconds:g}"

    def before_update(self) -> None:
        """Called before the optimizer changes what may still be being copied."""
        start = time.perf_counter()
        self._staging.wait()
        self._stall += time.perf_counter() - start

    def reports(self) -> list[SaveReport]:
        """The saves that ended since this was asked last."""
        if self._thread is not None and not self._thread.is_alive():
            self._settle()
        reports, self._reports = self._reports, []
        return reports

    def finish(self) -> list[SaveReport]:
        """Wait for the last save."""
        if not self._settle():
            warning = f"no checkpoint after step {self._step}: it is not written {self._deadline}"
            self._reports.append(SaveReport(self._step, self._stall, 0.0, 0, warning))
        return self.reports()

    def _settle(self) -> bool:
        """Wait for the save in flight, no longer than its deadline; whether none is left."""
        if self._thread is None:
            return True
        deadline = self._started + self._spec.timeout_seconds + GRACE
        self._thread.join(max(0.0, deadline - time.perf_counter()))
        if self._thread.is_alive():
            return False
        self._thread = None
        assert self._result is not None
        self._reports.append(SaveReport(self._step, self._stall, *self._result))
        return True

    def _count(self, *facts: bool) -> list[int]:
        """On how many ranks each is true."""
        counts = torch.tensor(facts, dtype=torch.int32, device=self._engine.device)
        return all_reduce(counts, self._engine.groups.world).tolist()

    def _write(self, manifest: Manifest) -> None:
        """The thread. Whatever happens is said in the result; a collective that failed leaves its group unusable."""
        target, rank = checkpoint_path(self._folder, manifest.step), self._engine.groups.world.index
        start, count, warning = time.perf_counter(), 0, ""
        try:
            self._staging.wait()
            write(self._staging, target, rank, manifest, self._group)
            count = self._bytes
        except CheckpointException as error:  # the same on all ranks: some rank could not write
            warning = str(next(iter(error.failures.values()), [error])[0])
            if rank == 0:
                with suppress(OSError):  # no rank writes any more, and a full disk needs the room
                    sweep(self._folder)
        except Exception as error:
            self._group_works = self._group is None
            late = time.perf_counter() - start >= self._spec.timeout_seconds
            warning = f"a rank did not answer {self._deadline}" if late else str(error)
        if warning:
            warning = f"no checkpoint after step {manifest.step}: {warning}"
        elif rank == 0:
            try:
                prune(self._folder, self._spec.keep, self._spec.keep_every, newest=target)
            except OSError as error:
                warning = f"old checkpoints stay in {self._folder}: {error}"
        self._result = (time.perf_counter() - start, count, warning)
