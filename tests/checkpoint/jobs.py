"""What the ranks of the pool do in checkpoint tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cuboid.checkpoint import storage
from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.huggingface.folder import ModelFolder
from cuboid.checkpoint.resume import begin_anew
from cuboid.checkpoint.save import load, save
from cuboid.checkpoint.shards import slices_of_shard
from cuboid.checkpoint.state import state_to_load
from cuboid.checkpoint.verify import check_index
from cuboid.checkpoint.weights import Started, start
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.generate.engine import make_generator
from cuboid.parallel.parallelize import build_engine, draw_weights
from cuboid.spec.generation import GenerationSpec
from cuboid.spec.run import Run
from cuboid.training.checkpointer import Checkpointer
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step

CPU = torch.device("cpu")
SMALL = ("model.layers=2", "model.hidden=16", "model.ffn=32", "model.heads=4", "model.kv_heads=2", "model.vocab=67")
"""A model whose checkpoints are a few kilobytes, of several chunks each."""


def start_and_save(rank: int, run: Run, folder: str, place: str) -> tuple[Started, int, int]:
    """What a rank read, how many parameters it keeps in all and in the largest part; saves as after step 0."""
    engine = build_engine(run, rank, CPU)
    started = start(engine, place)
    optimizer_shards = [optimizer_shard for unit in engine.units for optimizer_shard in unit.optimizer_shards()]
    save(engine, Optimizer(engine, run.optimizer), Path(folder), 0)
    kept = sum(
        tensor_slice.size
        for optimizer_shard in optimizer_shards
        for tensor_slice, _ in slices_of_shard(optimizer_shard.part, optimizer_shard.start, optimizer_shard.stop)
    )
    return started, kept, max(optimizer_shard.master.numel() for optimizer_shard in optimizer_shards)


def files_opened_to_generate(rank: int, spec: GenerationSpec) -> tuple[int, int]:
    """How often a rank reads all of a checkpoint's index, and how many safetensors files it opens, to fill its part."""
    opened, real = set[str](), ModelFolder._open

    def note(folder: ModelFolder, name: str) -> Any:
        opened.add(name)
        return real(folder, name)

    with patch.object(storage, "check_index", wraps=check_index) as looks, patch.object(ModelFolder, "_open", note):
        make_generator(spec, rank, CPU)
    return looks.call_count, len(opened)


def train_part(
    rank: int, run: Run, folder: str, start: int, stop: int, source: str | None, beyond: int = 0
) -> list[float]:
    """Steps start:stop, from a checkpoint if one is given; saves, and continues for some steps beyond. Returns the
    losses."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    if source is not None:
        load(engine, optimizer, source)

    def loss_of(step: int) -> float:
        batches = micro_batches(make_source(run), run, step, engine.groups.coordinates.dp, CPU)
        rate = learning_rate(run.learning_rate, step, run.training.steps)
        return train_step(engine, optimizer, batches, rate).loss

    losses = [loss_of(step) for step in range(start, stop)]
    save(engine, optimizer, Path(folder), stop)
    return losses + [loss_of(step) for step in range(stop, stop + beyond)]


def found_at_resume(rank: int, run: Run) -> int:
    """After which step a rank resumes."""
    engine = build_engine(run, rank, CPU, draw=False)
    return Checkpointer(engine, Optimizer(engine, run.optimizer), rank, quiet=True).found


def unlike_a_beginning(rank: int, run: Run) -> list[str]:
    """What a run has otherwise than one that never loaded anything, when it begins anew after it has read a checkpoint
    whose numbers are damaged."""
    states = []
    for spoiled in (False, True):
        engine = build_engine(run, rank, CPU, draw=False)
        optimizer = Optimizer(engine, run.optimizer)
        if spoiled:
            for held in state_to_load(engine, optimizer).values():
                for tensor in [values for _, values in held.slices] + list(held.near or ()):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
            begin_anew(engine, optimizer)
        else:
            draw_weights(engine)
            optimizer.begin_average()
        state = state_to_load(engine, optimizer)
        states.append({name: [values.clone() for _, values in held.slices] for name, held in state.items()})
    fresh, anew = states
    assert fresh.keys() == anew.keys()
    return [name for name in fresh if not all(map(torch.equal, fresh[name], anew[name]))]


def draw_after_loading(rank: int, run: Run, folder: str, first: bool = True) -> tuple[list[float], list[float]]:
    """Random numbers drawn after a save, and after loading what was saved."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    torch.manual_seed(rank if first else 100 + rank)
    if first:
        save(engine, optimizer, Path(folder), 0)
    drawn: list[float] = torch.rand(4).tolist()
    load(engine, optimizer, checkpoint_path(folder, 0))
    return drawn, torch.rand(4).tolist()
