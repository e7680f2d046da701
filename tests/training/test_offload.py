"""Offloading changes where the optimizer's state lies and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.parallel.zero import Unit
from cuboid.training.offload import OffloadedState, loads_of, place_of
from cuboid.training.optimizer import Optimizer
from tests.matrix import rest
from tests.parallel.cases import small_run
from tests.training.offload_jobs import CPU, LOAD


@pytest.mark.parametrize(
    ("layout", "precision", "compiled"),
    [
        ("dp=1", "bf16", False),
        ("dp=1", "bf16", True),
        ("dp=2,tp=2,zero=3", "bf16", False),
        ("dp=2,pp=2,zero=2", "float32", False),
        ("dp=1", "fp16", False),
        *rest(("dp=2,zero=1", "bf16", False)),
    ],
)
def test_results_and_checkpoints_are_the_same_bits(
    pool: Pool, tmp_path: Path, layout: str, precision: str, compiled: bool
) -> None:
    run = small_run(f"{layout},offload=true", f"training.precision={precision}", "training.deterministic=true")
    job = (run, str(tmp_path), compiled)
    for found in pool.run("tests.training.offload_jobs:differences", job, ranks=run.layout.world_size):
        assert found == []


def units(*overrides: str) -> list[Unit]:
    return build_engine(small_run("dp=1", *overrides), 0, CPU).units


def test_every_element_is_in_one_load_and_no_load_is_longer_than_asked() -> None:
    for unit in units("training.precision=bf16"):
        met = torch.zeros(unit.shard_size, dtype=torch.int64)
        optimizer_shards = unit.optimizer_shards()
        for load in loads_of(unit, LOAD, CPU):
            assert load.stop - load.start <= LOAD
            for cut in load.cuts:
                begin = place_of(unit, optimizer_shards[cut.optimizer_shard]) + cut.start
                assert begin - load.start == cut.place
                met[begin : begin + cut.stop - cut.start] += 1
        assert met.unique().tolist() == [1]
    assert any(len(loads_of(unit, LOAD, CPU)) > 3 for unit in units())


def test_what_lies_in_the_hosts_memory_is_ten_bytes_a_parameter_in_bf16() -> None:
    engine = build_engine(small_run("dp=1", "training.precision=bf16"), 0, CPU)
    state = OffloadedState(engine.units, CPU, LOAD)
    wanted = 10 * sum(unit.shard_size for unit in engine.units)
    pages = 3 * 4096 * len(engine.units)
    assert wanted <= state.host_bytes <= wanted + pages
    assert state.device_bytes == 3 * 10 * LOAD


def test_on_cpus_the_layout_field_changes_nothing() -> None:
    run = small_run("dp=1,offload=true")
    optimizer = Optimizer(build_engine(run, 0, CPU), run.optimizer)
    assert optimizer.host_bytes == 0
    assert optimizer.state_bytes() == 2 * 8 * run.model.parameters
