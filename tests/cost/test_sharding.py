"""Data parallelism and ZeRO: who holds and owns what, and how long keeping replicas equal takes."""

import numpy as np
import pytest

from cuboid.cost.compute import kernels
from cuboid.cost.constants import Fabric, chip_named
from cuboid.cost.engine import Engine
from cuboid.cost.flops import total_parameters
from cuboid.cost.inputs import Array, Jobs, Shape, number
from cuboid.cost.layers import layer_times
from cuboid.cost.sharding import (
    RankParameters,
    dense_layers_of,
    fully_sharded,
    owned_parameters,
    rank_parameters,
    reduction,
)
from cuboid.spec.model import MixtureSpec, ModelSpec, load_model

LLAMA = Shape.of(load_model("llama3-8b"))
MIXED = Shape.of(
    ModelSpec(
        hidden=1024,
        layers=12,
        heads=16,
        ffn=4096,
        vocab=32000,
        mixture=MixtureSpec(experts=32, top_k=2, expert_ffn=1024, first_dense_layers=2),
    )
)
FABRIC = Fabric(name="test", inner_bandwidth=1e11, outer_bandwidth=1e10, inner_latency=0.0, outer_latency=0.0)
BARE = Engine(name="test")
HELD = RankParameters(number(1e9), number(0))


def made(**values: object) -> Jobs:
    return Jobs.make(**{"global_batch": 256, "sequence": 2048, **values})


def exposed(engine: Engine = BARE, backward: float = 0.0, **values: object) -> float:
    return float(reduction(made(**values), FABRIC, engine, HELD, number(backward)))


def whole_model(shape: Shape, jobs: Jobs) -> Array:
    return rank_parameters(shape, jobs, shape.layers, number(1), number(1)).total


@pytest.mark.parametrize("shape", [LLAMA, MIXED])
def test_one_rank_holds_the_whole_model(shape: Shape) -> None:
    assert float(whole_model(shape, made())) == pytest.approx(float(total_parameters(shape)), rel=1e-6)


def test_tensor_and_expert_parallelism_split_what_a_rank_holds() -> None:
    assert float(whole_model(LLAMA, made(tp=8))) == pytest.approx(float(whole_model(LLAMA, made())) / 8)
    one, eight = (rank_parameters(MIXED, made(dp=8, ep=ep), number(12), number(1), number(1)) for ep in (1, 8))
    assert float(eight.routed) == pytest.approx(float(one.routed) / 8)
    assert float(eight.plain) == float(one.plain)


def test_pipeline_ranks_together_hold_the_model_once() -> None:
    jobs = made(pp=4)
    ends = [rank_parameters(LLAMA, jobs, number(8), number(flag), number(0)).total for flag in (1, 0, 0)]
    last = rank_parameters(LLAMA, jobs, number(8), number(0), number(1)).total
    assert float(sum(ends) + last) == pytest.approx(float(total_parameters(LLAMA)), rel=1e-6)


def test_leading_dense_layers_sit_on_the_first_rank() -> None:
    jobs = made(pp=3)
    assert float(dense_layers_of(MIXED, jobs, number(4), number(1))) == 2
    assert float(dense_layers_of(MIXED, jobs, number(4), number(0))) == 0
    assert float(dense_layers_of(LLAMA, jobs, number(11), number(0))) == 11


def test_ownership_shrinks_with_zero_and_with_the_shard_group() -> None:
    owned = [float(owned_parameters(made(dp=16, zero=zero), HELD)) for zero in (0, 1, 2, 3)]
    assert owned == [1e9, 1e9 / 16, 1e9 / 16, 1e9 / 16]
    assert float(owned_parameters(made(dp=16, zero=1, shard=4), HELD)) == 1e9 / 4


def test_reduction_takes_what_a_ring_takes() -> None:
    assert exposed(dp=8) == pytest.approx(2 * 7 / 8 * 4e9 / 1e11)
    # ZeRO 1 scatters gradients in four bytes and gathers parameters in two.
    assert exposed(dp=8, zero=1) == pytest.approx(7 / 8 * (4e9 + 2e9) / 1e11)
    assert exposed(dp=1) == 0


def test_overlap_hides_reduction_but_for_the_last_bucket() -> None:
    eager = Engine(name="eager", gradient_overlap=1.0)
    assert exposed(eager, backward=100.0, dp=8) == pytest.approx(0.05 * exposed(dp=8))
    assert exposed(eager, backward=0.01, dp=8) == pytest.approx(exposed(dp=8) - 0.01)


def test_zero_2_reduces_with_every_micro_batch() -> None:
    once, often = exposed(dp=8, zero=1), exposed(dp=8, zero=2)
    gather = 7 / 8 * 2e9 / 1e11
    assert often - gather == pytest.approx(32 * (once - gather))


def test_zero_3_leaves_reduction_to_its_layers() -> None:
    assert exposed(dp=8, zero=3) == 0


QUICK = Fabric(name="quick", inner_bandwidth=4e11, outer_bandwidth=4e10, inner_latency=0.0, outer_latency=1e-4)


def waiting(**values: object) -> float:
    jobs = made(zero=3, **values)
    parts = kernels(LLAMA, jobs, chip_named("h100-80g"), BARE, "bf16")
    times = layer_times(LLAMA, jobs, QUICK, BARE, parts, "bf16")
    return float(fully_sharded(LLAMA, jobs, QUICK, BARE, times))


def test_fully_sharded_traffic_waits_where_layers_are_too_short() -> None:
    # Per token: four short micro-batches wait longer than one that hides most of its traffic.
    assert 4 * waiting(dp=64, micro_batch=1) > 3 * waiting(dp=64, micro_batch=4)


def test_hybrid_sharding_saves_the_trip_around_all_nodes() -> None:
    assert waiting(dp=1024, shard=8, micro_batch=1) < 0.5 * waiting(dp=1024, micro_batch=1)


def test_everything_broadcasts_over_layouts() -> None:
    times = reduction(made(dp=number([1, 8, 64]), zero=number([0, 1, 2])), FABRIC, BARE, HELD, number(0))
    assert times.shape == (3,)
    assert np.all(np.diff(times) > 0)
