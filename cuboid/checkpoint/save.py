"""Save and load a training's state through `torch.distributed.checkpoint`, from any layout into any other."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import Manifest, Place
from cuboid.checkpoint.reader import Reader
from cuboid.checkpoint.scattered import LoadPlanner, SavePlanner
from cuboid.checkpoint.staging import Staging
from cuboid.checkpoint.state import Moments, state_to_load, state_to_save
from cuboid.checkpoint.writer import Writer
from cuboid.data.opened import data_identity
from cuboid.parallel.apply import Engine
from cuboid.spec.run import dump_run

# That a training of one rank has no process group is meant.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def save(engine: Engine, optimizer: Moments, folder: Place, step: int) -> Location:
    """Every rank calls this after `step` optimizer steps; when it returns the checkpoint is published."""
    run = engine.run
    position = step * run.training.global_batch
    manifest = Manifest(step, optimizer.steps_taken, position, data_identity(run), str(run.layout), dump_run(run))
    target = checkpoint_path(folder, step)
    state = state_to_save(engine, optimizer)
    staging = Staging(state, engine.device)
    staging.fill(state)
    staging.wait()
    writer = Writer(target, engine.groups.world.index, manifest, staging)
    planner = SavePlanner(flatten_state_dict=False)
    save_state(staging.state, storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())
    return target


def load(engine: Engine, optimizer: Moments, checkpoint: Place, updates: int) -> None:
    """Fill this rank's state, whatever layout wrote it; every rank calls this."""
    planner = LoadPlanner(flatten_state_dict=False)
    state = state_to_load(engine, optimizer)
    load_state(state, storage_reader=Reader(checkpoint), planner=planner, no_dist=not dist.is_initialized())
    optimizer.set_steps_taken(updates)
    for unit in engine.units:
        unit.publish()
