"""Save and load a training's state through `torch.distributed.checkpoint`, from any layout into any other."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.manifest import Manifest
from cuboid.checkpoint.scattered import LoadPlanner, SavePlanner
from cuboid.checkpoint.state import Moments, state_to_load, state_to_save
from cuboid.checkpoint.storage import Reader, Writer
from cuboid.parallel.apply import Engine
from cuboid.spec.run import dump_run


def save(engine: Engine, optimizer: Moments, folder: Path, step: int) -> Path:
    """Every rank calls this after `step` optimizer steps; when it returns the checkpoint is published."""
    run = engine.run
    manifest = Manifest(step, optimizer.steps_taken, step * run.training.global_batch, str(run.layout), dump_run(run))
    target = checkpoint_path(folder, step)
    writer = Writer(target, engine.groups.world.index, manifest)
    planner = SavePlanner(flatten_state_dict=False)
    save_state(
        state_to_save(engine, optimizer), storage_writer=writer, planner=planner, no_dist=not dist.is_initialized()
    )
    return target


def load(engine: Engine, optimizer: Moments, checkpoint: Path, updates: int) -> None:
    """Fill this rank's state, whatever layout wrote it; every rank calls this."""
    planner = LoadPlanner(flatten_state_dict=False)
    state = state_to_load(engine, optimizer)
    load_state(state, storage_reader=Reader(checkpoint), planner=planner, no_dist=not dist.is_initialized())
    optimizer.set_steps_taken(updates)
    for unit in engine.units:
        unit.publish()
