"""The space of layouts: what is in it, and that columns and layouts are the same thing."""

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuboid.planning.question import Question
from cuboid.planning.space import DEGREES, Space, bases, degrees, divisors, scheduled, schedules
from cuboid.spec.cluster import load_cluster
from cuboid.spec.fitting import check
from cuboid.spec.layout import SCHEDULES, Layout
from cuboid.spec.model import ModelSpec
from tests.planning.conftest import MIXED

LAYOUTS = [
    "dp=8,tp=1,pp=1,zero=3,shard=4",
    "dp=2,tp=2,pp=2,zero=1,schedule=zbv,micro_batch=2,recompute=full",
    "dp=1,tp=4,pp=2,schedule=interleaved,vpp=3,sequence_parallel=false",
    "dp=4,tp=1,pp=2,schedule=gpipe,recompute=selective",
]


def test_layouts_come_back_from_columns(ask: Callable[..., Question]) -> None:
    layouts = [Layout.parse(text) for text in LAYOUTS]
    space = Space.of(layouts, ask())
    assert len(space) == 4
    assert [space.layout(index) for index in range(4)] == layouts
    assert [str(space.take(np.array([2, 0])).layout(index)) for index in range(2)] == [LAYOUTS[2], LAYOUTS[0]]
    assert space.pipelines == [1, 2]


def test_columns_are_what_the_cost_model_reads(ask: Callable[..., Question]) -> None:
    jobs = Space.of([Layout.parse(text) for text in LAYOUTS], ask()).jobs
    assert jobs.world_size.tolist() == [8, 8, 8, 8]
    assert jobs.micro_batches.tolist() == [1, 2, 8, 2]
    assert jobs.shard.tolist() == [4, 2, 1, 4]
    assert jobs.sequence_parallel.tolist() == [0, 1, 0, 0]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5000))
def test_divisors_divide_and_are_complete(number: int) -> None:
    found = divisors(number)
    assert list(found) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def test_degrees_multiply_to_the_world(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x64", global_batch=48)
    found = list(degrees(question, 64))
    assert all(dp * tp * pp * cp == 64 for dp, tp, pp, cp, _ in found)
    assert {dp for dp, *_ in found} <= {1, 2, 4, 8, 16}
    assert len(found) == len(set(found))


def test_context_and_experts_are_among_the_degrees_of_a_mixture(ask: Callable[..., Question]) -> None:
    found = list(degrees(ask(MIXED), 8))
    assert {cp for *_, cp, _ in found} == {1, 2, 4, 8}
    assert {ep for *_, ep in found} == {1, 2, 4}
    assert all(dp * cp * tp % ep == 0 for dp, tp, _, cp, ep in found)


def test_schedules_of_a_pipeline(ask: Callable[..., Question]) -> None:
    def named(**fixed: object) -> list[tuple[str, int]]:
        return [(SCHEDULES[index], vpp) for index, vpp in schedules(ask(fixed=fixed), 2)]

    assert named() == [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb1p", 1), ("zbv", 2), ("dualpipev", 2)]
    assert named(schedule="gpipe") == [("gpipe", 1)]
    assert named(schedule="interleaved", vpp=3) == [("interleaved", 3)]
    assert named(vpp=2) == [("interleaved", 2), ("zbv", 2), ("dualpipev", 2)]
    assert schedules(ask(), 1) == [(SCHEDULES.index("1f1b"), 1)]
    # Six layers leave no room for two stages on each of four ranks.
    assert [SCHEDULES[index] for index, _ in schedules(ask(), 4)] == ["1f1b", "zb1p"]


def test_without_sequence_parallelism_only_where_it_cannot_be(ask: Callable[..., Question]) -> None:
    space = bases(ask(sequence=6), 8)
    for index in range(len(space)):
        layout = space.layout(index)
        splits = layout.micro_batch * 6 // layout.cp % layout.tp == 0
        assert layout.sequence_parallel == (layout.tp > 1 and splits)


def test_an_impossible_space_is_empty(ask: Callable[..., Question]) -> None:
    space = bases(ask(fixed={"micro_batch": 3}), 8)
    assert len(space) == len(scheduled(ask(), space)) == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([2, 4, 6, 8, 12]),
    st.sampled_from([1, 2, 3, 5, 6]),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([2, 4, 6, 12]),
    st.sampled_from([7, 8, 96]),
)
def test_every_layout_of_any_space_passes_the_check(
    world: int, layers: int, heads: int, batch: int, sequence: int
) -> None:
    model = ModelSpec(name="any", hidden=heads * 8, layers=layers, heads=heads, ffn=heads * 16, vocab=101)
    question = Question(model=model, cluster=load_cluster(f"cpux{world}"), global_batch=batch, sequence=sequence)
    space = scheduled(question, bases(question, world))
    for index in range(0, len(space), max(len(space) // 60, 1)):
        layout = space.layout(index)
        check(layout, model, global_batch=batch, sequence=sequence, world_size=world)
    assert len({str(space.layout(index)) for index in range(min(len(space), 300))}) == min(len(space), 300)
    assert all(prod(row) > 0 for row in zip(*(space.columns[name] for name in DEGREES[:4]), strict=True))


@pytest.mark.parametrize("shard", [2, 4])
def test_hybrid_sharding_is_kept_where_asked(ask: Callable[..., Question], shard: int) -> None:
    space = bases(ask(fixed={"shard": shard}), 8)
    assert len(space) > 0
    assert set(space.columns["shard"].tolist()) == {shard}
    assert all(dp % shard == 0 for dp in space.columns["dp"].tolist())
    assert min(space.columns["zero"].tolist()) == 1
