"""Data parallelism and ZeRO: who holds and owns what, and how long keeping replicas equal takes."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from cuboid.cost.compute import kernels
from cuboid.cost.constants import Engine, Fabric, chip_named
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.layers import layer_times
from cuboid.cost.memory import memory_by_rank
from cuboid.cost.sharding import (
    RankParameters,
    dense_layers_of,
    fully_sharded,
    owned_parameters,
    rank_parameters,
    reduction,
    tied_sum,
)
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec, load_model
from cuboid.spec.sharding import ShardingRank, units

TINY = ("tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek")
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


OWN = Engine(name="own", own_collectives=True)


def exposed(engine: Engine = BARE, backward: float = 0.0, forward: float = 0.0, **values: object) -> float:
    return float(reduction(LLAMA, made(**values), FABRIC, engine, HELD, number(forward), number(backward)))


def given(model: ModelSpec, tp: int, ep: int = 1, *, first: bool = True, last: bool = True) -> int:
    """By the table that the engine itself reads."""
    return sum(
        prod(split.slice_of(name, full, ShardingRank(tp, expert=ep)).local_shape(full))
        for unit in units(model, range(model.layers), first, last)
        for name, (full, split) in unit.parameters.items()
    )


@pytest.mark.parametrize("name", [*TINY, "qwen2.5-7b", "gpt3-175b", "deepseek-v2", "deepseek-v3"])
def test_tensor_ranks_hold_what_the_engine_gives_them(name: str) -> None:
    """Norms, routers, matmuls down to a latent and biases added after a sum are whole on each, keys and values as far
    as their heads do not suffice."""
    model = load_model(name)
    shape = Shape.of(model)
    degrees = [tp for tp in (1, 2, 4, 8) if model.heads % tp == 0]
    for first, last in ((True, True), (True, False), (False, True)):
        ends = number(float(first)), number(float(last))
        found = rank_parameters(shape, made(tp=degrees), shape.layers, *ends).total
        assert found.tolist() == [given(model, tp, first=first, last=last) for tp in degrees]
    assert given(model, 1) == model.parameters
    if model.mixture:
        found = rank_parameters(shape, made(tp=4, ep=8), shape.layers, number(1), number(1)).total
        assert float(found) == given(model, 4, 8)


def test_expert_parallelism_splits_routed_experts_only() -> None:
    one, eight = (rank_parameters(MIXED, made(dp=8, ep=ep), number(12), number(1), number(1)) for ep in (1, 8))
    assert float(eight.routed) == pytest.approx(float(one.routed) / 8)
    assert float(eight.plain) == float(one.plain)


def test_pipeline_ranks_together_hold_the_model_once() -> None:
    jobs = made(pp=4)
    ends = [rank_parameters(LLAMA, jobs, number(8), number(flag), number(0)).total for flag in (1, 0, 0)]
    last = rank_parameters(LLAMA, jobs, number(8), number(0), number(1)).total
    assert float(sum(ends) + last) == load_model("llama3-8b").parameters


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


def test_hybrid_sharding_scatters_inside_and_sums_shards_between() -> None:
    inside = 7 / 8 * (4e9 + 2e9) / 1e11
    between = 2 * 7 / 8 * 4e9 / 8 / 1e10  # of an eighth of the gradients, over eight nodes
    assert exposed(OWN, dp=64, zero=1, shard=8) == pytest.approx(inside + between)
    # ZeRO 2 scatters with every micro-batch and sums between nodes once.
    again = 7 / 8 * 4e9 / 1e11
    assert exposed(OWN, dp=64, zero=2, shard=8) == pytest.approx(inside + between + 3 * again)


def test_gathering_hides_behind_a_forward_pass_at_most() -> None:
    hiding = Engine(name="hiding", own_collectives=True, gather_overlap=1.0)
    gather = 7 / 8 * 2e9 / 1e11
    hidden = [exposed(OWN, dp=8, zero=1) - exposed(hiding, forward=seconds, dp=8, zero=1) for seconds in (100.0, 0.001)]
    assert hidden == pytest.approx([gather, 0.001])


def test_zero_3_leaves_reduction_to_its_layers() -> None:
    assert exposed(dp=8, zero=3) == 0


QUICK = Fabric(name="quick", inner_bandwidth=4e11, outer_bandwidth=4e10, inner_latency=0.0, outer_latency=1e-4)


def waiting(engine: Engine = BARE, shape: Shape = LLAMA, head: float = 100.0, **values: object) -> float:
    """`head`: its seconds, behind which its own traffic hides."""
    jobs = made(zero=3, **values)
    parts = kernels(shape, jobs, chip_named("h100-80g"), BARE, "bf16")
    times = layer_times(shape, jobs, QUICK, BARE, parts, "bf16")
    return float(fully_sharded(shape, jobs, QUICK, engine, times, (number(head), number(head))))


def test_fully_sharded_traffic_waits_where_layers_are_too_short() -> None:
    # Four short micro-batches wait longer than one that hides most of its traffic.
    assert waiting(dp=64, micro_batch=1) > 3 * waiting(dp=64, micro_batch=4)


def test_hybrid_sharding_saves_the_trip_around_all_nodes() -> None:
    assert waiting(dp=1024, shard=8, micro_batch=1) < 0.5 * waiting(dp=1024, micro_batch=1)


def test_this_program_sums_shards_over_replicas_once_a_step() -> None:
    often, once = (waiting(engine, dp=64, shard=8, micro_batch=1) for engine in (BARE, OWN))
    alone = [waiting(engine, dp=8, micro_batch=1, global_batch=32) for engine in (BARE, OWN)]
    assert alone[0] == alone[1], "without replicas both are one"
    tables = 2 * LLAMA.hidden * LLAMA.vocab / 8 * 4 / 4e10 * 2 * 7 / 8 + 2 * 7**0.7 * 1e-4
    assert often - alone[0] == pytest.approx(4 * (once - alone[0] - float(tables)))


def test_experts_are_gathered_from_their_own_holders() -> None:
    """With ep as wide as a node each node has one holder of an expert, and so one port for it instead of eight."""
    bare = Engine(name="bare", shard_overlap=0.0, shard_contention=0.0)
    jobs = {"dp": 64, "micro_batch": 4, "global_batch": 256}
    whole, spread = (waiting(bare, MIXED, **jobs, ep=ep) for ep in (1, 8))
    routed = 3 * 32 * 1024 * 1024
    # Two gathers and a scatter of 8 bytes a parameter, in ten layers and once more for those that nothing precedes.
    bytes_moved = (10 * 8 + 10 / 12 * 6) * routed
    fewer = bytes_moved / 8 * 7 / 8 / 4e10
    more = bytes_moved * 63 / 64 / 3.2e11
    assert spread - whole == pytest.approx(fewer - more, rel=0.05)


def test_the_vocabulary_is_gathered_too() -> None:
    seen, hidden = (waiting(OWN, head=head, dp=64, micro_batch=4) for head in (0.0, 100.0))
    tables = 2 * LLAMA.hidden * LLAMA.vocab * 63 / 64 / 3.2e11
    assert seen - hidden == pytest.approx(float(8 * tables) + 3 * 7e-4, rel=0.01)


def test_the_gradient_of_a_tied_embedding_crosses_the_pipeline() -> None:
    tied = Shape.of(replace(load_model("llama3-8b"), tie_embeddings=True))
    jobs = made(dp=8, pp=4, tp=2)
    size = 4 * LLAMA.hidden * LLAMA.vocab / 2
    assert float(tied_sum(tied, jobs, FABRIC, OWN)) == pytest.approx(float(size) / 1e10)
    assert float(tied_sum(tied, made(dp=8, pp=4, tp=2, zero=1), FABRIC, OWN)) == pytest.approx(float(size) / 8e10)
    assert float(tied_sum(tied, made(dp=8), FABRIC, OWN)) == 0
    # Six ranks apart, on one node of eight.
    assert float(tied_sum(tied, made(dp=1, pp=4, tp=2), FABRIC, OWN)) == pytest.approx(float(size) / 1e11)
    assert float(tied_sum(LLAMA, jobs, FABRIC, OWN)) == 0


def test_everything_broadcasts_over_layouts() -> None:
    jobs = made(dp=number([1, 8, 64]), zero=number([0, 1, 2]))
    times = reduction(LLAMA, jobs, FABRIC, BARE, HELD, number(0), number(0))
    assert times.shape == (3,)
    assert np.all(np.diff(times) > 0)


def test_zero_2_is_what_each_engine_makes_of_it() -> None:
    """Eight micro-batches: sums with each of them, or, by FSDP in a pipeline's stages, once; FSDP without a pipeline
    also gathers with each."""
    fsdp = Engine(name="fsdp", fsdp=True)
    jobs = {"dp": 8, "zero": 2, "micro_batch": 4, "global_batch": 256}
    scatter, gather = 7 / 8 * 4e9 / 1e11, 7 / 8 * 2e9 / 1e11
    assert exposed(**jobs) == pytest.approx(8 * scatter + gather)
    assert exposed(**jobs, pp=2) == pytest.approx(8 * scatter + gather)
    assert exposed(fsdp, **jobs) == pytest.approx(8 * scatter + 8 * gather)
    assert exposed(fsdp, **jobs, pp=2) == pytest.approx(scatter + gather)
    hidden = exposed(fsdp, forward=10.0, **jobs)
    assert hidden == pytest.approx(8 * scatter + 8 * 0.05 * gather), "gathered while the layer before computes"
    whole, split = (memory_by_rank(LLAMA, made(**jobs, pp=2), engine)["first"].gradients for engine in (fsdp, BARE))
    assert float(whole) == pytest.approx(8 * float(split)), "in a pipeline FSDP keeps gradients whole until the last"
