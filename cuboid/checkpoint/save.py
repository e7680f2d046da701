"""Save and load a training's state through `torch.distributed.checkpoint`, from any layout into any other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.generators import generators, restore_generators
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import Manifest, Place, StoredFile, read_manifest
from cuboid.checkpoint.reader import Reader
from cuboid.checkpoint.scattered import LoadPlanner, SavePlanner, Scattered
from cuboid.checkpoint.staging import Staging
from cuboid.checkpoint.state import Moments, state_to_load, state_to_save
from cuboid.checkpoint.writer import Writer
from cuboid.data.opened import data_identity
from cuboid.parallel.apply import Engine
from cuboid.resilience.pulse import PULSE
from cuboid.spec.run import dump_run

# That one process needs no group is no news.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def deadline_group(seconds: float) -> dist.ProcessGroup | None:
    """A group of all ranks for checkpoints alone: it never waits behind the training's collectives, nor for ever. Every
    rank calls this; None if there is only one."""
    if not dist.is_initialized():
        return None
    with PULSE.everybody().joined("new group"):
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return group


class Damaged(Exception):
    """A checkpoint cannot be used, as all ranks know; says why."""


def agree(reason: str, group: dist.ProcessGroup | None) -> None:
    """Every rank says why the checkpoint is damaged, or nothing; all raise the same `Damaged` if one did."""
    reasons = [reason]
    if dist.is_initialized():
        reasons = [""] * dist.get_world_size()
        with PULSE.everybody().joined("agreement"):
            dist.all_gather_object(reasons, reason, group=group)
    if reason := next(filter(None, reasons), ""):
        raise Damaged(reason)


def describe(engine: Engine, optimizer: Moments, step: int, data: str) -> Manifest:
    run = engine.run
    if engine.loss_scale is not None:
        engine.course.loss_scale = engine.loss_scale.values()
    position = engine.course.batch(step) * run.training.global_batch
    taken, layout, course = optimizer.steps_taken, str(run.layout), engine.course.table()
    return Manifest(step, taken, position, data, layout, dump_run(run), course=course)


def kept_state(engine: Engine, optimizer: Moments) -> dict[str, Scattered]:
    """What this rank answers for, as it stands now."""
    return {**state_to_save(engine, optimizer), **generators(engine)}


def write(staging: Staging, target: Location, rank: int, manifest: Manifest, group: dist.ProcessGroup | None) -> None:
    """Every rank calls this with its state staged; when it returns the checkpoint is published."""
    writer = Writer(target, rank, manifest, staging)
    planner = SavePlanner(flatten_state_dict=False)
    alone = not dist.is_initialized()
    save_state(staging.state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


def save(engine: Engine, optimizer: Moments, folder: Place, step: int) -> Location:
    """Once, and waiting for it; a training saves through a `Saver`."""
    target = checkpoint_path(folder, step)
    state = kept_state(engine, optimizer)
    staging = Staging(state, engine.device)
    staging.fill(state)
    staging.wait()
    manifest = describe(engine, optimizer, step, data_identity(engine.run))
    write(staging, target, engine.groups.world.index, manifest, None)
    return target


def load(
    engine: Engine,
    optimizer: Moments,
    checkpoint: Place,
    group: dist.ProcessGroup | None = None,
    index: dict[str, Any] | None = None,
    share: Mapping[str, StoredFile] | None = None,
) -> Manifest:
    """Fill this rank's state, whatever layout wrote it; every rank calls this. Random generators go on where they were
    if the layout is the one that wrote it: to another one their numbers would mean nothing.

    `index`: the checkpoint's, checked already. `share`: files that this rank compares with their checksums; if any rank
    finds one damaged, all raise `Damaged`, and what they hold is worth nothing."""
    manifest = read_manifest(checkpoint)
    reader = Reader(checkpoint, index, share)
    state = state_to_load(engine, optimizer)
    reader.require({name: held.full_shape for name, held in state.items()})
    own = generators(engine) if manifest.layout == str(engine.run.layout) else {}
    own = {name: held for name, held in own.items() if name in reader.names}
    planner = LoadPlanner(flatten_state_dict=False)
    alone = not dist.is_initialized()
    with PULSE.everybody().joined("load"):
        load_state({**state, **own}, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
    if share is not None:
        agree(str(reader.damage or ""), group)
    restore_generators(engine, own)
    optimizer.set_steps_taken(manifest.updates)
    engine.course.restore(manifest.course)
    if engine.loss_scale is not None:
        engine.loss_scale.restore(engine.course.loss_scale)
    for unit in engine.units:
        unit.publish()
    return manifest
