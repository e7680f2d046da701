"""What a rank holds: hand-computed states, and properties every layout must have."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.cost.compute import layer_parameters
from cuboid.cost.constants import Engine, engine_named, tables
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.memory import Memory, kept_per_layer, memory_by_rank, peak_memory
from cuboid.spec.layout import SCHEDULES
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec, load_model

PLAIN = Engine(name="plain", gradient_bytes=2.0, fixed=0.0)
GPT = load_model("gpt3-175b")
MIXED = ModelSpec(
    hidden=2048,
    layers=24,
    heads=16,
    ffn=6144,
    vocab=32000,
    mixture=MixtureSpec(experts=64, top_k=4, expert_ffn=1408, first_dense_layers=1),
)
ENGINES = tuple(tables()["engines"])


def layouts() -> st.SearchStrategy[dict[str, float]]:
    return st.fixed_dictionaries(
        {
            "dp": st.sampled_from((1, 2, 4, 16, 64)),
            "tp": st.sampled_from((1, 2, 8)),
            "pp": st.sampled_from((1, 2, 4, 12)),
            "cp": st.sampled_from((1, 2)),
            "micro_batch": st.sampled_from((1, 2, 4)),
            "recompute": st.sampled_from((0, 1, 2)),
            "schedule": st.sampled_from(range(len(SCHEDULES))),
        }
    )


def made(layout: dict[str, float], **changes: object) -> Jobs:
    chunks = 2 if SCHEDULES[int(layout["schedule"])] in ("interleaved", "zbv", "dualpipev") else 1
    return Jobs.make(**{**layout, "vpp": chunks, "global_batch": 1024, "sequence": 2048, **changes})


def test_states_of_the_seeds_worked_example() -> None:
    # 175B on 1,024 A100: tp 8, pp 16, dp 8 hold 2.7 GB of weights, as much of gradients, 16.4 GB of optimizer state.
    jobs = Jobs.make(dp=8, tp=8, pp=16, micro_batch=1, global_batch=1536, sequence=2048)
    middle = memory_by_rank(Shape.of(GPT), jobs, PLAIN)["second"]
    assert float(middle.weights) / 1e9 == pytest.approx(2.7, rel=0.03)
    assert float(middle.gradients) / 1e9 == pytest.approx(2.7, rel=0.03)
    assert float(middle.optimizer) / 1e9 == pytest.approx(16.4, rel=0.03)


def test_kept_activations_follow_korthikanti() -> None:
    # 34·s·b·h bytes per layer and 5·a·s²·b of scores, split by tensor parallelism where it can be.
    shape = Shape.of(GPT)
    engine = engine_named("megatron-2021")
    whole = 2048 * 12288
    scores = 5 * 96 * 2048**2
    one = Jobs.make(tp=1, global_batch=1, sequence=2048)
    assert float(kept_per_layer(shape, one, engine)[0]) == pytest.approx(34 * whole + scores)
    split = Jobs.make(tp=8, sequence_parallel=0, global_batch=1, sequence=2048)
    assert float(kept_per_layer(shape, split, engine)[0]) == pytest.approx(whole * (10 + 24 / 8) + scores / 8)
    both = Jobs.make(tp=8, recompute=1, global_batch=1, sequence=2048)
    assert float(kept_per_layer(shape, both, engine)[0]) == pytest.approx(34 * whole / 8)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from(ENGINES), st.booleans())
def test_a_higher_zero_stage_never_needs_more(layout: dict[str, float], engine: str, mixed: bool) -> None:
    shape = Shape.of(MIXED if mixed else GPT)
    profile = engine_named(engine)
    peaks = peak_memory(shape, made(layout, zero=number([0, 1, 2, 3])), profile)
    # From ZeRO 2 on this program holds the gradient of a unit whole while it is on its way, and under ZeRO 3 the
    # weights of two, however small the rest is.
    each = layer_parameters(shape)
    largest = max(float(size) for size in (shape.vocab * shape.hidden, each.dense, each.mixture + each.routed))
    whole = 20 * largest if profile.compiled else 0.0
    assert np.all(np.diff(peaks) <= 1e-6 * peaks[0] + whole)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from(ENGINES), st.integers(0, 3))
def test_the_table_sums_to_its_total_and_the_fullest_rank_counts(
    layout: dict[str, float], engine: str, zero: int
) -> None:
    profile = engine_named(engine)
    table = memory_by_rank(Shape.of(GPT), made(layout, zero=zero), profile)
    totals = []
    for memory in table.values():
        lines = [float(getattr(memory, item.name)) for item in fields(Memory)]
        assert sum(lines) == pytest.approx(float(memory.total))
        assert all(line >= 0 for line in lines)
        totals.append(float(memory.total))
    peak = float(peak_memory(Shape.of(GPT), made(layout, zero=zero), profile))
    assert peak == pytest.approx(profile.reserve * max(totals))


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from(ENGINES))
def test_more_recomputation_and_more_sharding_never_need_more(layout: dict[str, float], engine: str) -> None:
    shape, profile = Shape.of(GPT), engine_named(engine)
    kept = [
        memory_by_rank(shape, made({**layout, "recompute": level}), profile)["first"].activations for level in (0, 1, 2)
    ]
    assert float(kept[0]) >= float(kept[1]) >= float(kept[2])
    narrow, wide = (peak_memory(shape, made(layout, zero=3, dp=64, shard=shard), profile) for shard in (8, 64))
    assert float(wide) <= float(narrow)


def test_context_parallelism_splits_activations() -> None:
    shape = Shape.of(load_model("llama3-8b"))
    one, four = (
        memory_by_rank(shape, Jobs.make(cp=cp, global_batch=4, sequence=32768), PLAIN)["first"].activations
        for cp in (1, 4)
    )
    assert float(four) == pytest.approx(float(one) / 4)


def test_expert_parallelism_splits_experts_not_their_tokens() -> None:
    shape = Shape.of(MIXED)
    one, eight = (
        memory_by_rank(shape, Jobs.make(dp=8, ep=ep, global_batch=64, sequence=2048), PLAIN)["first"] for ep in (1, 8)
    )
    assert float(eight.weights) < 0.25 * float(one.weights)
    assert float(eight.activations) == pytest.approx(float(one.activations))


def test_offloaded_optimizer_state_leaves_the_accelerator() -> None:
    jobs = Jobs.make(dp=8, zero=1, offload=1, global_batch=64, sequence=2048)
    assert float(memory_by_rank(Shape.of(GPT), jobs, PLAIN)["first"].optimizer) == 0


def test_a_v_shaped_schedule_puts_the_head_on_the_first_rank() -> None:
    shape = Shape.of(load_model("llama3-8b"))
    plain = Jobs.make(pp=4, global_batch=64, sequence=4096)
    vee = Jobs.make(pp=4, vpp=2, schedule=SCHEDULES.index("zbv"), global_batch=64, sequence=4096)
    assert float(memory_by_rank(shape, plain, PLAIN)["first"].logits) == 0
    assert float(memory_by_rank(shape, vee, PLAIN)["first"].logits) > 0
    assert float(memory_by_rank(shape, vee, PLAIN)["last"].logits) == 0
