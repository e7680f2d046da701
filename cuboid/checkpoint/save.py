"""Save and load a training's state, from any layout into any other; `Saver` does it while the training continues."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from cuboid.checkpoint.folder import checkpoint_path, prune, sweep
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, Damage, Manifest, Place, StoredFile, data_file, read_manifest
from cuboid.checkpoint.owner import Ownership
from cuboid.checkpoint.shards import ShardedTensor
from cuboid.checkpoint.state import Moments, generators, restore_generators, state_to_load, state_to_save
from cuboid.checkpoint.storage import Reader, Staging, Writer, index_part, whole_index
from cuboid.checkpoint.terms import FENCE
from cuboid.console import say
from cuboid.data.opened import data_identity
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.coordination import Coordination, open_coordination
from cuboid.parallel.parallelize import Engine
from cuboid.spec.run import dump_run
from cuboid.telemetry.heartbeat import HEARTBEAT


class Damaged(Exception):
    """A checkpoint cannot be used, as all ranks know; says why."""


class GivenUp(Exception):
    """A save that failed, which all ranks know."""


def agree(reason: str, group: Coordination) -> None:
    """Every rank says why the checkpoint is damaged, or nothing; all raise the same `Damaged` if one did."""
    if reason := group.agree(reason):
        raise Damaged(reason)


def describe(engine: Engine, optimizer: Moments, step: int, data: str) -> Manifest:
    run = engine.run
    if engine.loss_scale is not None:
        engine.course.loss_scale = engine.loss_scale.values()
    if engine.balance is not None:
        engine.course.loads = engine.balance.values()
    position = run.training.places(engine.course.batch(step))[0]
    taken, layout, course = optimizer.steps_taken, str(run.layout), engine.course.table()
    return Manifest(step, taken, position, data, layout, dump_run(run), course=course)


def kept_state(engine: Engine, optimizer: Moments) -> dict[str, ShardedTensor]:
    """What this rank answers for, as it stands now."""
    return {**state_to_save(engine, optimizer), **generators(engine)}


def gather_index(staging: Staging, group: Coordination) -> bytes:
    """The index of all that the ranks stage, on rank 0: it is the same at every save. Every rank calls this."""
    return whole_index(group.gather(index_part(staging, group.rank)))


def write(
    staging: Staging,
    target: Location,
    manifest: Manifest,
    index: bytes,
    group: Coordination,
    ownership: Ownership | None = None,
) -> None:
    """Every rank calls this with its state staged; when it returns the checkpoint is published. `index`: of all ranks,
    on rank 0. `ownership`: of the folder it is published in."""
    writer = Writer(target, group.rank, manifest, staging)

    def may_write() -> str:
        return _problem(FENCE.check) or (_problem(ownership.check) if ownership else "")

    # Also before anything is opened: that removes what is there of this step, which another leader may have written.
    problem = may_write() if group.rank == 0 else ""
    problem = problem or (_problem(lambda: writer.open(ownership is not None)) if group.rank == 0 else "")
    problem = group.broadcast(problem)
    if not problem:
        own: list[StoredFile | None] = []
        said = _problem(lambda: own.append(writer.write()))
        told = group.gather((said, own[0] if own else None))
        if group.rank == 0:
            files = {data_file(rank): file for rank, (_, file) in enumerate(told) if file is not None}
            first = next((said for said, _ in told if said), "")
            problem = first or may_write()
            problem = problem or _problem(lambda: writer.publish(index, files))
        problem = group.broadcast(problem)
    if problem:
        raise GivenUp(problem)


def _problem(work: Callable[[], None]) -> str:
    """What went wrong, told in words: an exception of one rank must not keep the others waiting."""
    try:
        work()
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def save(engine: Engine, optimizer: Moments, folder: Place, step: int) -> Location:
    """Once, and waiting for it; a training saves through a `Saver`."""
    target = checkpoint_path(folder, step)
    state = kept_state(engine, optimizer)
    staging = Staging(state, engine.device)
    staging.fill(state)
    staging.wait()
    manifest = describe(engine, optimizer, step, data_identity(engine.run))
    group = open_coordination(engine.run.checkpoint.timeout_seconds)
    write(staging, target, manifest, gather_index(staging, group), group)
    return target


def load(
    engine: Engine,
    optimizer: Moments,
    checkpoint: Place,
    group: Coordination | None = None,
    manifest: Manifest | None = None,
    index: dict[str, Any] | None = None,
    to_check: Mapping[str, StoredFile] | None = None,
) -> Manifest:
    """Fill this rank's state, whatever layout wrote it; every rank calls this. Random generators continue where they
    were if the layout is the one that wrote it: to another one their numbers would mean nothing.

    `manifest`, `index`: the checkpoint's, checked already; of the index at least what this rank needs. `to_check`:
    files that this rank compares with their checksums; if any rank finds one damaged, all raise `Damaged`, and what
    they hold is worth nothing."""
    manifest = manifest or read_manifest(checkpoint)
    reader = Reader(checkpoint, index, to_check)
    state = state_to_load(engine, optimizer)
    own = generators(engine) if manifest.layout == str(engine.run.layout) else {}
    # Another PyTorch may keep a generator's state in another size.
    own = {
        name: held
        for name, held in own.items()
        if name in reader.names and reader.index[name]["shape"] == list(held.full_shape)
    }
    missing = optimizer.beside().keys() - reader.names
    damage = None
    try:
        reader.fill({**{name: held for name, held in state.items() if name not in missing}, **own})
    except Damage as error:  # what one rank finds all must know
        damage = error
    damage = damage or reader.damage
    if damage is None and (name := restore_generators(engine, own)):
        damage = Damage(locate(checkpoint), INDEX, f"is wrong about {name!r}, which is no state of a random generator")
    if group is not None:
        agree(str(damage or ""), group)
    elif damage is not None:
        raise damage
    optimizer.set_steps_taken(manifest.updates)
    engine.course.restore(manifest.course)
    if engine.loss_scale is not None:
        engine.loss_scale.restore(engine.course.loss_scale)
    if engine.balance is not None:
        engine.balance.restore(engine.course.loads, manifest.step)
    for unit in engine.units:
        unit.publish()
    return manifest


# Saves that the training does not wait for: the state is copied aside, and a thread writes it where it belongs.


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
    place: str = "disk"
    """Or memory."""


class BackgroundSaver(ABC):
    """One save is in flight at a time. A save that fails costs a warning, and leaves the earlier ones alone."""

    place = "disk"
    kept = "checkpoint"
    """What is made, in a sentence."""

    def __init__(self, engine: Engine, optimizer: Moments, group: Coordination) -> None:
        """`group` is used by nobody else while a save is in flight; every rank calls this."""
        self._engine, self._optimizer = engine, optimizer
        self._rank = engine.groups.world.index
        self._spec = engine.run.checkpoint
        self._group = group
        # Rank 0 writes the manifest: the others need not look at the data to say which it is.
        self._data = data_identity(engine.run) if self._rank == 0 else ""
        self._bytes = 0
        """Of all ranks, told by who stages them."""
        self._thread: threading.Thread | None = None
        self._step = 0
        self._started = 0.0
        self._stall = 0.0
        self._staging: Staging | None = None
        self._result: SaveReport | None = None
        self._reports: list[SaveReport] = []

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether this rank can save now; waits for what is in flight if it should."""

    @property
    @abstractmethod
    def _hindrance(self) -> str:
        """Why the state cannot be kept where some rank is not ready."""

    @abstractmethod
    def _place_for(self, kept_before: bool) -> Staging:
        """Where the state is copied to. `kept_before`: some rank knows that all have kept the last one."""

    @abstractmethod
    def _keep(self, staging: Staging, manifest: Manifest) -> str:
        """In the thread: returns a warning, or nothing, when it is kept; raises `GivenUp` if all ranks know it is
        not."""

    @property
    def _knows_it_is_kept(self) -> bool:
        return self._result is not None and self._result.bytes > 0

    def save(self, step: int) -> None:
        """Every rank calls this after `step` steps. Returns when the state is copied, or on a GPU being copied."""
        start = time.perf_counter()
        ready = self._is_ready()
        hindered, kept = self._count(not ready, self._knows_it_is_kept)
        if hindered:
            self._leave_out(step, time.perf_counter() - start)
            return
        self._group = self._group.renew()
        manifest = describe(self._engine, self._optimizer, step, self._data)
        self._staging = self._place_for(kept > 0)
        self._staging.fill(kept_state(self._engine, self._optimizer))
        self._step, self._started, self._result = step, time.perf_counter(), None
        arguments = (self._staging, manifest)
        self._thread = threading.Thread(target=self._work, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not self._spec.asynchronous:
            self._join(self._spec.timeout_seconds + GRACE)
        self._stall = time.perf_counter() - start

    def _leave_out(self, step: int, seconds: float) -> None:
        warning = f"no {self.kept} after step {step}: {self._hindrance}"
        self._reports.append(SaveReport(step, seconds, 0.0, 0, warning, self.place))

    @property
    def _deadline(self) -> str:
        return f"within checkpoint.timeout_seconds={self._spec.timeout_seconds:g}"

    def before_update(self) -> None:
        """Called before the optimizer changes what may still be being copied."""
        if self._staging is not None:
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
            warning = f"no {self.kept} after step {self._step}: it is not written {self._deadline}"
            self._reports.append(SaveReport(self._step, self._stall, 0.0, 0, warning, self.place))
        return self.reports()

    @property
    def _in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _settle(self) -> bool:
        """Wait for the save in flight, no longer than its deadline; whether none is left."""
        if self._thread is None:
            return True
        deadline = self._started + self._spec.timeout_seconds + GRACE
        self._join(max(0.0, deadline - time.perf_counter()))
        if self._thread.is_alive():
            return False
        self._thread = None
        assert self._result is not None
        HEARTBEAT.learn("save", int(self._result.write_seconds * 1e9))
        self._reports.append(replace(self._result, stall_seconds=self._stall))
        return True

    def _join(self, seconds: float) -> None:
        assert self._thread is not None
        HEARTBEAT.everybody(self.kept).wait("save", self._step)
        self._thread.join(seconds)
        HEARTBEAT.end_wait()

    def _count(self, *facts: bool) -> list[int]:
        """On how many ranks each is true."""
        counts = torch.tensor(facts, dtype=torch.int32, device=self._engine.device)
        return all_reduce(counts, self._engine.groups.world).tolist()

    def _sum_of_all(self, own: int) -> int:
        return int(all_reduce(torch.tensor(own, device=self._engine.device), self._engine.groups.world))

    def _work(self, staging: Staging, manifest: Manifest) -> None:
        """The thread. Whatever happens is said in the result."""
        start, count = time.perf_counter(), 0
        try:
            staging.wait()
            warning = self._keep(staging, manifest)
            count = self._bytes
        except GivenUp as error:
            warning = f"no {self.kept} after step {manifest.step}: {error}"
        except Exception as error:
            late = isinstance(error, TimeoutError) or time.perf_counter() - start >= self._spec.timeout_seconds
            reason = f"a rank did not answer {self._deadline}" if late else str(error)
            warning = f"no {self.kept} after step {manifest.step}: {reason}"
        HEARTBEAT.everybody(self.kept).reach(manifest.step)
        self._result = SaveReport(manifest.step, 0.0, time.perf_counter() - start, count, warning, self.place)


# Saves to disk while the training continues.


class Saver(BackgroundSaver):
    """The training waits for a save that takes longer than the steps between two."""

    def __init__(
        self,
        engine: Engine,
        optimizer: Moments,
        folder: Location,
        group: Coordination,
        ownership: Ownership | None = None,
    ) -> None:
        super().__init__(engine, optimizer, group)
        self._folder, self._ownership = folder, ownership
        self._own = Staging(kept_state(engine, optimizer), engine.device)
        self._bytes = self._sum_of_all(self._own.content.nbytes)
        self._index = gather_index(self._own, group)

    def _is_ready(self) -> bool:
        if self._in_flight and self._rank == 0:
            say(f"the training waits for the checkpoint after step {self._step} to be written", as_warning=True)
        return self._settle()

    @property
    def _hindrance(self) -> str:
        return f"that after step {self._step} is not written {self._deadline}"

    def _place_for(self, kept_before: bool) -> Staging:
        return self._own

    def _keep(self, staging: Staging, manifest: Manifest) -> str:
        target = checkpoint_path(self._folder, manifest.step)
        try:
            write(staging, target, manifest, self._index, self._group, self._ownership)
        except GivenUp:  # on all ranks
            if self._rank == 0:
                with suppress(OSError):  # no rank writes any more, and a full disk needs the room
                    sweep(self._folder)
            raise
        if self._rank == 0:
            try:
                prune(self._folder, self._spec.keep, self._spec.keep_every, newest=target)
            except OSError as error:
                return f"old checkpoints stay in {self._folder}: {error}"
        return ""
