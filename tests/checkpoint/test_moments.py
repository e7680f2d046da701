"""A change of layout moves every element of parameters and moments to where it belongs, copies included, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.save import load, save
from cuboid.checkpoint.storage import whole_tensors
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.spec.sharding import Slice
from cuboid.training.optimizer import Optimizer
from tests.checkpoint.jobs import CPU
from tests.parallel.cases import small_run

KINDS = ("parameter", "exp_avg", "exp_avg_sq")
SMALL = ("model.layers=4", "model.hidden=32", "model.ffn=64", "model.vocab=131", "training.global_batch=8")
WRITERS = {
    # Tied embeddings on both ends of a pipeline, two kv heads on four tensor ranks, a vocabulary that does not divide.
    "tiny-qwen3": "dp=1,tp=4,pp=2,zero=1",
    "tiny-llama": "dp=2,tp=2,pp=2,zero=3",
    "tiny-gpt2": "dp=2,tp=4",
    "tiny-mixtral": "dp=2,tp=2,pp=2,ep=2",
}
READERS = ["tp=8", "dp=2,tp=4,zero=2", "pp=2,dp=4,zero=3,schedule=zbv", "dp=8,zero=1,shard=4", "dp=1"]


def part_of(full: Tensor, cut: Slice) -> Tensor:
    """What a rank holds of a tensor, padding included, cut out in the plainest way."""
    real = full.narrow(cut.dimension, cut.start, cut.stop - cut.start)
    padding = list(full.shape)
    padding[cut.dimension] = cut.length - (cut.stop - cut.start)
    return torch.cat((real, full.new_zeros(padding)), cut.dimension).flatten()


def load_and_compare(rank: int, run: Run, source: str, target: str) -> tuple[list[str], int]:
    """The names of pieces that differ from the checkpoint, and how many were compared; then save what was loaded."""
    engine = build_engine(run, rank, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    for optimizer_shard in optimizer.optimizer_shards:  # what is not overwritten will show
        for tensor in (optimizer_shard.master, *optimizer.state_of(optimizer_shard).values()):
            tensor[
                : _real(
                    optimizer_shard.part.slice, optimizer_shard.start, optimizer_shard.stop, optimizer_shard.part.shape
                )
            ].fill_(7.0)
    manifest = load(engine, optimizer, locate(source))
    assert optimizer.steps_taken == manifest.updates == 2
    whole = whole_tensors(source)
    wrong, compared = [], 0
    for optimizer_shard in optimizer.optimizer_shards:
        for kind, held in zip(
            KINDS, (optimizer_shard.master, *optimizer.state_of(optimizer_shard).values()), strict=True
        ):
            expected = part_of(whole[f"{kind}/{optimizer_shard.part.name}"], optimizer_shard.part.slice)[
                optimizer_shard.start : optimizer_shard.stop
            ]
            compared += 1
            if not torch.equal(held, expected):
                wrong.append(f"{kind}/{optimizer_shard.part.name} on rank {rank}")
    save(engine, optimizer, target, 2)
    return wrong, compared


def _real(cut: Slice, start: int, stop: int, shape: tuple[int, ...]) -> int:
    """How many elements of a piece are no padding; only rows of a vocabulary are padded."""
    rows = cut.stop - cut.start
    if rows == cut.length:
        return stop - start
    return max(0, min(stop, rows * shape[1]) - start)


@pytest.mark.parametrize("model", WRITERS)
def test_every_element_is_where_it_belongs(pool: Pool, tmp_path: Path, thorough: bool, model: str) -> None:
    writer = small_run(WRITERS[model], *SMALL, model=model)
    arguments = (writer, str(tmp_path / "first"), 0, 2, None)
    pool.run("tests.checkpoint.jobs:train_part", arguments, ranks=writer.layout.world_size)
    before = checkpoint_path(tmp_path / "first", 2)
    original = whole_tensors(before)
    zeros = [name for name, tensor in original.items() if not tensor.any()]
    assert not zeros or (writer.model.mixture and len(zeros) < len(original) / 4), "zeros would prove nothing"
    experts = ["dp=4,ep=4,zero=1", "dp=2,tp=4,ep=2,zero=2"] if writer.model.mixture else []
    readers = READERS if thorough else READERS[list(WRITERS).index(model) % 2 :: 2]  # the models take turns
    for number, layout in enumerate([*experts, *readers]):
        run = small_run(layout, *SMALL, model=model)
        folder = tmp_path / str(number)
        arguments_of_load = (run, before.path, str(folder))
        results = pool.run(
            "tests.checkpoint.test_moments:load_and_compare", arguments_of_load, ranks=run.layout.world_size
        )
        assert [name for wrong, _ in results for name in wrong] == []
        assert sum(compared for _, compared in results) >= len(original)
        before = checkpoint_path(folder, 2)
        again = whole_tensors(before)
        assert again.keys() == original.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
