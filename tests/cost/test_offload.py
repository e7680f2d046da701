"""Optimizer state in CPU memory: bytes there, seconds over the link."""

from dataclasses import replace

import numpy as np
import pytest

from cuboid.cost.constants import Engine, chip_named, engine_named
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.memory import memory_by_rank
from cuboid.cost.sharding import RankParameters, host_bytes, optimizer_time
from cuboid.spec.model import load_model
from cuboid.training.offload import LOAD, SLOTS

BARE = Engine(name="test", optimizer_bytes=10.0)
STREAMED = replace(BARE, offload_elements=3e6)
HELD = RankParameters(number(1e9), number(0))
CHIP = chip_named("h100-80g")
MODEL = load_model("llama3-8b")


def made(**values: float) -> Jobs:
    return Jobs.make(**values, global_batch=64, sequence=4096)


def seconds(jobs: Jobs, engine: Engine = BARE, forward: float = 0.0) -> float:
    return float(optimizer_time(jobs, CHIP, engine, HELD, np.asarray(forward)))


def test_the_optimizer_step_is_bound_by_memory_and_shared_by_owners() -> None:
    alone, shared = (seconds(made(dp=8, zero=zero)) for zero in (0, 1))
    bandwidth = CHIP.memory_bandwidth * CHIP.memory_efficiency
    assert alone == pytest.approx((BARE.optimizer_passes + 4) * 1e9 / bandwidth)
    assert shared < 0.25 * alone


def test_state_that_comes_and_goes_takes_the_time_of_the_link_less_the_pass_that_follows() -> None:
    norm = 4 * 1e9 / (CHIP.memory_bandwidth * CHIP.memory_efficiency)
    link = 10 * 1e9 / CHIP.host_link
    away = made(offload=1)
    assert seconds(away, STREAMED) == pytest.approx(link + norm)
    assert seconds(away, STREAMED, forward=0.4 * link) == pytest.approx(0.6 * link + norm)
    hidden, here = seconds(away, STREAMED, forward=10 * link), seconds(made(), STREAMED)
    assert hidden == pytest.approx(here), "the pass that follows slows down by what the update computes"
    assert seconds(away, replace(STREAMED, optimizer_bytes=100.0), forward=100 * link) == pytest.approx(
        0.5 * link + norm
    ), "the first unit is waited for"
    assert seconds(away) > 2 * seconds(away, STREAMED), "a host that updates by itself is slower"


def test_bytes_in_the_hosts_memory_are_what_leaves_the_accelerator() -> None:
    shape, engine = Shape.of(MODEL), replace(STREAMED, offload_elements=0.0)
    for zero in (0, 1):
        here, away = (made(dp=8, zero=zero, offload=flag) for flag in (0, 1))
        before, after = (memory_by_rank(shape, jobs, engine)["first"] for jobs in (here, away))
        assert float(host_bytes(shape, here, engine)) == 0
        assert float(host_bytes(shape, away, engine)) == pytest.approx(float(before.total - after.total))
        wanted = 10 * MODEL.parameters / (8 if zero else 1)
        assert float(host_bytes(shape, away, engine)) == pytest.approx(wanted, rel=1e-3)


def test_the_loads_under_way_take_room_on_the_accelerator() -> None:
    shape = Shape.of(MODEL)
    away = made(offload=1)
    without, loaded = (memory_by_rank(shape, away, engine)["first"].optimizer for engine in (BARE, STREAMED))
    assert float(loaded - without) == pytest.approx(10 * 3e6)
    assert engine_named("cuboid").offload_elements == SLOTS * LOAD
