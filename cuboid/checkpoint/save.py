"""Save and load a training's state, from any layout into any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import Manifest, Place, StoredFile, data_file, read_manifest
from cuboid.checkpoint.shards import ShardedTensor
from cuboid.checkpoint.state import Moments, generators, restore_generators, state_to_load, state_to_save
from cuboid.checkpoint.storage import Reader, Staging, Writer, index_part, whole_index
from cuboid.data.opened import data_identity
from cuboid.parallel.coordination import Coordination, open_coordination
from cuboid.parallel.parallelize import Engine
from cuboid.spec.run import dump_run


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
    position = engine.course.batch(step) * run.training.global_batch
    taken, layout, course = optimizer.steps_taken, str(run.layout), engine.course.table()
    return Manifest(step, taken, position, data, layout, dump_run(run), course=course)


def kept_state(engine: Engine, optimizer: Moments) -> dict[str, ShardedTensor]:
    """What this rank answers for, as it stands now."""
    return {**state_to_save(engine, optimizer), **generators(engine)}


def gather_index(staging: Staging, group: Coordination) -> bytes:
    """The index of all that the ranks stage, on rank 0: it is the same at every save. Every rank calls this."""
    return whole_index(group.gather(index_part(staging, group.rank)))


def write(staging: Staging, target: Location, manifest: Manifest, index: bytes, group: Coordination) -> None:
    """Every rank calls this with its state staged; when it returns the checkpoint is published. `index`: of all ranks,
    on rank 0."""
    writer = Writer(target, group.rank, manifest, staging)
    problem = group.broadcast(_problem(writer.open) if group.rank == 0 else "")
    if not problem:
        own: list[StoredFile | None] = []
        said = _problem(lambda: own.append(writer.write()))
        told = group.gather((said, own[0] if own else None))
        if group.rank == 0:
            files = {data_file(rank): file for rank, (_, file) in enumerate(told) if file is not None}
            first = next((said for said, _ in told if said), "")
            problem = first or _problem(lambda: writer.publish(index, files))
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
    own = {name: held for name, held in own.items() if name in reader.names}
    reader.fill({**state, **own})
    if to_check is not None and group is not None:
        agree(str(reader.damage or ""), group)
    restore_generators(engine, own)
    optimizer.set_steps_taken(manifest.updates)
    engine.course.restore(manifest.course)
    if engine.loss_scale is not None:
        engine.loss_scale.restore(engine.course.loss_scale)
    if engine.balance is not None:
        engine.balance.restore(engine.course.loads, manifest.step)
    for unit in engine.units:
        unit.publish()
    return manifest
