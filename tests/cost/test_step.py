"""The time of a step: its parts, and how it moves when the layout or the machine does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.cost.compute import kernels
from cuboid.cost.constants import Engine, chip_named, engine_named, fabric_named, tables
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.layers import layer_times
from cuboid.cost.sharding import owned_parameters, rank_parameters
from cuboid.cost.step import PARTS, StepTime, step_time
from cuboid.spec.layout import SCHEDULES
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec, load_model

CHIP, FABRIC = chip_named("h100-80g"), fabric_named("h100")
LLAMA = Shape.of(load_model("llama3-70b"))
MIXED = Shape.of(
    ModelSpec(
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocab=151936,
        mixture=MixtureSpec(experts=128, top_k=8, expert_ffn=768),
    )
)
ENGINES = tuple(tables()["engines"])


def step(shape: Shape = LLAMA, engine: str | Engine = "nemo", precision: str = "bf16", **values: object) -> StepTime:
    profile = engine_named(engine) if isinstance(engine, str) else engine
    jobs = Jobs.make(**{"global_batch": 1024, "sequence": 4096, **values})
    return step_time(shape, jobs, CHIP, FABRIC, profile, precision)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(ENGINES),
    st.sampled_from((1, 2, 8, 16)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 8, 64)),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from(range(len(SCHEDULES))),
    st.sampled_from(("bf16", "fp8")),
    st.booleans(),
)
def test_parts_are_never_negative_and_add_up(
    engine: str, tp: int, pp: int, dp: int, zero: int, recompute: int, schedule: int, precision: str, mixed: bool
) -> None:
    chunks = 2 if SCHEDULES[schedule] in ("interleaved", "zbv", "dualpipev") else 1
    values = {"tp": tp, "pp": pp, "dp": dp, "zero": zero, "recompute": recompute, "schedule": schedule, "vpp": chunks}
    result = step(MIXED if mixed else LLAMA, engine, precision, **values)
    parts = {name: float(getattr(result, name)) for name in PARTS}
    assert all(np.isfinite(value) and value >= -1e-9 for value in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(float(result.total))
    assert parts["compute"] > 0


def test_arrays_answer_as_single_layouts_do() -> None:
    together = step(tp=number([1, 2, 4, 8]), pp=number([8, 4, 2, 1]), dp=8).total
    alone = [float(step(tp=tp, pp=pp, dp=8).total) for tp, pp in ((1, 8), (2, 4), (4, 2), (8, 1))]
    assert together.tolist() == pytest.approx(alone)


def test_full_recomputation_costs_a_forward_pass_more() -> None:
    none, full = (float(step(tp=8, pp=4, dp=8, recompute=level).compute) for level in (0, 2))
    assert 1.2 < full / none < 1.4


def test_selective_recomputation_costs_less_than_full() -> None:
    none, selective, full = (float(step(tp=8, pp=4, dp=8, recompute=level).total) for level in (0, 1, 2))
    assert none < selective < full


def test_eight_bits_are_faster_and_less_than_twice_as_fast() -> None:
    wide, narrow = (float(step(tp=4, pp=4, dp=8, precision=name).total) for name in ("bf16", "fp8"))
    assert 0.5 < narrow / wide < 0.95


def test_interleaving_and_zero_bubble_shrink_the_bubble() -> None:
    def idle(name: str, chunks: int = 1) -> float:
        return float(step(pp=8, tp=8, dp=8, schedule=SCHEDULES.index(name), vpp=chunks, global_batch=128).bubble)

    assert idle("interleaved", 5) == pytest.approx(idle("1f1b") / 5, rel=0.01)
    assert idle("zb1p") < idle("1f1b")
    assert idle("zbv", 2) < idle("zb1p")


def test_more_micro_batches_make_a_smaller_share_of_bubble() -> None:
    shares = []
    for batch in (64, 128, 512):
        result = step(pp=8, tp=8, dp=8, global_batch=batch)
        shares.append(float(result.bubble) / float(result.total))
    assert shares == sorted(shares, reverse=True)


def test_tensor_parallelism_across_nodes_is_punished() -> None:
    inside, across = (float(step(tp=tp, dp=32, pp=1).tensor) for tp in (8, 16))
    assert across > 1.5 * inside


def test_launch_bound_layers_take_the_hosts_time() -> None:
    slow = Engine(name="slow", host_forward=0.01, host_backward=0.02)
    small = Shape.of(ModelSpec(hidden=256, layers=10, heads=4, ffn=1024, vocab=1024))
    result = step(small, slow, global_batch=4, sequence=128)
    assert float(result.total) == pytest.approx(4 * 10 * 0.03, rel=0.05)
    assert float(result.host) > 0.9 * float(result.total)


def test_odd_head_counts_fall_back_from_megatrons_fused_softmax() -> None:
    # vTrain: 16 heads on 8 ranks run slower with one sequence per micro-batch than with two.
    shape = Shape.of(load_model("gpt3-175b"))
    engine = Engine(name="old", host_forward=1.0, host_fallback=0.5)
    parts = kernels(shape, Jobs.make(tp=48, global_batch=2, sequence=64), CHIP, engine, "bf16")
    odd, even = (
        layer_times(
            shape, Jobs.make(tp=48, micro_batch=size, global_batch=2, sequence=64), FABRIC, engine, parts, "bf16"
        )
        for size in (1, 2)
    )
    assert float(odd.dense[0].total) == pytest.approx(float(even.dense[0].total) + 0.5)


def test_zero_3_traffic_hides_behind_large_layers_only() -> None:
    large, small = (float(step(dp=64, zero=3, micro_batch=size, engine="fsdp").data) for size in (4, 1))
    assert small > large


def test_sharding_splits_ownership_over_replicas_and_experts() -> None:
    jobs = Jobs.make(dp=16, ep=8, zero=1, global_batch=64, sequence=1024)
    held = rank_parameters(MIXED, jobs, number(48), number(1), number(1))
    owned = float(owned_parameters(jobs, held))
    # Plain parameters are split sixteen ways, experts over the two replicas that hold the same ones.
    assert owned == pytest.approx(float(held.plain) / 16 + float(held.routed) / 2)


def test_offloading_makes_the_optimizer_slower() -> None:
    here, there = (float(step(dp=8, tp=8, zero=1, offload=flag).optimizer) for flag in (0, 1))
    assert there > 10 * here


def test_expert_traffic_counts_a_node_once() -> None:
    once, often = (
        float(step(MIXED, Engine(name="test", expert_once=flag), dp=32, ep=32).expert) for flag in (True, False)
    )
    assert once < often


def test_input_gradients_are_summed_under_weight_gradients() -> None:
    """Of all that tensor ranks wait for, no more than the sums of input gradients backward; nothing where the schedule
    puts weight gradients off, and no longer than those take."""
    engine = engine_named("cuboid")
    bare = replace(engine, tensor_under_weights=0.0)
    for layout, most in (("sequence_parallel", 0.25), ("whole", 0.5)):
        split = number(layout == "sequence_parallel")
        hiding, plain = (float(step(engine=each, tp=8, sequence_parallel=split).tensor) for each in (engine, bare))
        assert 0.5 * most * plain < plain - hiding <= most * plain * (1 + 1e-9), layout
    latents = Shape.of(load_model("deepseek-v3"))
    attention = kernels(latents, Jobs.make(global_batch=1024, sequence=4096, tp=8), CHIP, engine, "bf16")
    assert attention.attention_columns > attention.shared_columns, "the up-projections are the larger matmuls"
    deferred = [step(engine=each, tp=8, pp=8, schedule=SCHEDULES.index("zb1p")).tensor for each in (engine, bare)]
    assert deferred[0] == deferred[1]
