"""What a training keeps of its state, and continues from: checkpoints, copies in memory, the weights it began with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cuboid.checkpoint.memory.nodes import open_memory
from cuboid.checkpoint.memory.restore import MemoryRestore
from cuboid.checkpoint.memory.saver import MemorySaver
from cuboid.checkpoint.owner import Ownership
from cuboid.checkpoint.resume import begin_anew, resume
from cuboid.checkpoint.save import Saver, SaveReport
from cuboid.checkpoint.weights import start
from cuboid.console import say
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.parallelize import Engine, draw_weights
from cuboid.training.callbacks import Callback
from cuboid.training.optimizer import Optimizer
from cuboid.training.run_folder import checkpoint_folder, last_row

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer


class Checkpointer(Callback):
    """Every rank makes one, which fills the engine, and calls the same methods in the same order."""

    def __init__(self, engine: Engine, optimizer: Optimizer, rank: int, quiet: bool) -> None:
        run = engine.run
        self._engine, self._optimizer, self._quiet = engine, optimizer, quiet
        self._folder = checkpoint_folder(run)
        self._group = open_coordination(run.checkpoint.timeout_seconds)
        self._ownership = Ownership(run, self._folder) if rank == 0 else None
        self._check_ownership()
        nodes = open_memory(run, rank, self._group) if run.checkpoint.memory_every else None
        # Before the savers are made: reading ends with sweeping this node's memory, where they then make their slots.
        self.found = self._resume(MemoryRestore(nodes, self._group, last_row(run)) if nodes else None)
        """Steps done, as the run begins or continues."""
        self.saver: Saver | None = None
        if run.checkpoint.every:
            self.saver = Saver(engine, optimizer, self._folder, self._group, self._ownership)
        self.copies = MemorySaver(engine, optimizer, nodes, quiet) if nodes else None
        if not self.found:
            self._begin()
        self.saved = self.found
        """Steps of the newest checkpoint."""
        self.last_save = -1 if nodes else self.found  # what was found in memory may not be on disk
        self.can_go_back = self.found > 0
        self._longest_step = 0.0
        self._warned = False

    def _check_ownership(self) -> None:
        """Rank 0 alone asks: where it ends, all end."""
        if self._ownership is not None:
            self._ownership.check()

    def _resume(self, in_memory: MemoryRestore | None = None) -> int:
        return resume(self._engine, self._optimizer, self._folder, self._group, self._quiet, in_memory)

    def _begin(self) -> None:
        place = self._engine.run.training.start_from
        if place:
            start(self._engine, place, self._quiet)
        else:
            draw_weights(self._engine)
        self._optimizer.begin_average()

    def go_back(self) -> int:
        """To the newest checkpoint; the steps it has done."""
        # Copies in memory may hold steps after the checkpoint, which are about to be undone.
        if self.copies is not None:
            self.copies.take_back()
        self.last_save = self._resume()
        if not self.last_save:
            # Nothing whole was left to load: moments and counters of the steps undone must go too.
            begin_anew(self._engine, self._optimizer)
            self._begin()
        return self.last_save

    def is_due(self, step: int) -> bool:
        run = self._engine.run
        return self.saver is not None and run.checkpoint.is_due(step, run.training.steps)

    def _is_due_in_memory(self, step: int) -> bool:
        run = self._engine.run
        return run.checkpoint.is_due_in_memory(step, run.training.steps)

    def keeps_after(self, step: int) -> bool:
        """Whether the state after a step is kept, on disk or in memory."""
        return self.is_due(step) or (self.copies is not None and self._is_due_in_memory(step))

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return self.is_due(step) or self._is_due_in_memory(step)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if self.copies is not None and self._is_due_in_memory(step):
            self.copies.save(step)  # a moment of its step: short saves would teach that all are
            if self._engine.ledger is not None:
                self._engine.ledger.take()  # no part of a step
            trainer.start_clock()
        if self.is_due(step):
            trainer.save()

    def before_update(self) -> None:
        for saver in (self.saver, self.copies):
            if saver is not None:
                saver.before_update()

    def save(self, step: int) -> None:
        assert self.saver is not None
        self._check_ownership()
        self.last_save = step
        self.saver.save(step)

    def reports(self, step_seconds: float) -> list[SaveReport]:
        """Of saves that ended since."""
        self._longest_step = max(self._longest_step, step_seconds)
        reports = self.saver.reports() if self.saver else []
        self._note(reports)
        return reports + (self.copies.reports() if self.copies else [])

    def settle(self) -> tuple[list[SaveReport], bool]:
        """Wait for what is being saved; whether all of it is."""
        reports = self.saver.finish() if self.saver is not None else []
        self._note(reports)
        kept = not any(report.warning for report in reports)
        if not kept:
            self._check_ownership()
        return reports + (self.copies.finish() if self.copies is not None else []), kept

    def _note(self, saves: Sequence[SaveReport]) -> None:
        """What is saved, and whether it would be in time if the job were asked to stop."""
        grace = self._engine.run.resilience.grace_seconds
        for save in saves:
            if not save.bytes:
                continue
            self.saved, self.can_go_back = save.step, True
            # Asked just after a step began, a rank ends it, copies the state, and writes it.
            needed = self._longest_step + save.stall_seconds + save.write_seconds
            if needed > grace and not self._warned and self._engine.groups.world.index == 0:
                self._warned = True
                say(
                    f"resilience.grace_seconds={grace:g} is less than a step and a save take here, {needed:.1f} s: a "
                    "preempted job would lose what it did since its last checkpoint",
                    as_warning=True,
                )
