"""What a search skips by its bounds is no better than what it returns."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cuboid.cost.inputs import Array
from cuboid.planning.question import Question, resized
from cuboid.planning.refine import lighter, may_mix
from cuboid.planning.score import (
    Least,
    least_fitting,
    least_in_layers,
    least_scheduled,
    least_seconds,
    least_with_sums,
    score,
    score_all,
)
from cuboid.planning.search import search
from cuboid.planning.space import PLAIN, Space, bases, scheduled
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.layout import CONTEXT_METHODS, RECOMPUTE, Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.partition import longest_stage
from tests.planning.conftest import MIXED
from tests.planning.test_properties import clusters, models

ENGINES = ("cuboid", "megatron", "nanotron", "torchtitan", "hai-llm")


def changed(space: Space, **values: int) -> Space:
    """The layouts with some fields the same for all."""
    columns = {name: np.full(len(space), value, dtype=np.int64) for name, value in values.items()}
    return Space({**space.columns, **columns}, space.global_batch, space.sequence)


def bounds(question: Question, space: Space) -> dict[str, Array]:
    """Every bound of layouts, each from as much of a layout as is known where the search asks for it."""
    plain = changed(space, schedule=PLAIN, vpp=1)
    stateless = changed(plain, zero=0, shard=0)
    bare = changed(stateless, recompute=0)
    shape = changed(bare, cp_method=CONTEXT_METHODS.index("ulysses"))
    shape = Space({**shape.columns, "cp_inner": shape.columns["cp"]}, space.global_batch, space.sequence)
    return {
        "shape": least_seconds(question, shape, context=False),
        "context": least_seconds(question, bare, context=True),
        "layers": least_in_layers(question, stateless),
        "sums": least_with_sums(question, plain),
        "even": score(question, plain).even,
        "schedule": least_scheduled(question, space),
        "own": score(question, space).even,
    }


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    models(),
    clusters(),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from([8, 24, 96]),
    st.sampled_from(ENGINES),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_no_layout_takes_less_than_any_of_its_bounds(
    model: ModelSpec, cluster: ClusterSpec, nodes: int, batch: int, engine: str, offload: bool, seed: int
) -> None:
    whole = Question(model=model, cluster=cluster, global_batch=batch, sequence=512, engine=engine, beyond_engine=True)
    question = resized(whole, min(8 * nodes, cluster.accelerators))
    draw = np.random.default_rng(seed).permutation
    some = bases(question, question.cluster.accelerators)
    some = scheduled(question, some.take(draw(len(some))[:300]))
    some = some.take(draw(len(some))[:800])
    assume(len(some))
    space = some.offloaded() if offload else some
    seconds = score(question, space).seconds
    for name, bound in bounds(question, space).items():
        worst = int(np.argmax(bound / seconds))
        assert bound[worst] <= seconds[worst] * (1 + 1e-9), (name, str(space.layout(worst)))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    models(),
    st.sampled_from(["h100x8", "a100-40gx16", "h100x24"]),
    st.sampled_from([8, 24, 96]),
    st.sampled_from([512, 4096]),
    st.sampled_from(ENGINES),
    st.sampled_from([0.05, 0.1, 0.2, 0.4, 0.95]),
    st.integers(0, 2**16),
)
def test_no_layout_that_fits_takes_less_than_what_its_memory_asks_for(
    model: ModelSpec, cluster: str, batch: int, sequence: int, engine: str, part: float, seed: int
) -> None:
    """Also those that recompute some of their layers, and those that offload."""
    place = load_cluster(cluster)
    limit = part * place.memory_gib * 2**30
    question = Question(
        model=model, cluster=place, global_batch=batch, sequence=sequence, engine=engine, memory_limit=limit
    )
    random = np.random.default_rng(seed)
    some = bases(question, place.accelerators)
    some = scheduled(question, some.take(random.permutation(len(some))[:600]))
    some = some.take(random.permutation(len(some))[:2000])
    assume(len(some))
    stages = some.columns["pp"] * some.columns["vpp"]
    longest = np.array([longest_stage(model, count, sequence) for count in stages.tolist()], dtype=np.int64)
    full = some.columns["recompute"] == RECOMPUTE.index("full")
    layers = np.where(full & (longest > 1), random.integers(1, np.maximum(longest, 2)), 0)
    mixed = Space({**some.columns, "recompute_layers": layers}, some.global_batch, some.sequence)
    every = some.concatenated(mixed) if may_mix(question, "time") else some
    scores = score(question, every.concatenated(every.offloaded()) if question.tries_offload else every)
    scores = scores.take(np.flatnonzero(scores.fits))
    assume(len(scores.space))
    space = changed(scores.space, recompute_layers=0, offload=0)
    shape = changed(space, schedule=PLAIN, vpp=1, zero=0, shard=0, recompute=0)
    shape = changed(shape, cp_method=CONTEXT_METHODS.index("ulysses"))
    shape = Space({**shape.columns, "cp_inner": shape.columns["cp"]}, space.global_batch, space.sequence)
    memory, bound = least_fitting(question, shape, least_seconds(question, shape, context=False))
    assert np.all(memory <= question.limit)
    assert np.all(bound <= scores.seconds * (1 + 1e-9))
    plain = changed(space, schedule=PLAIN, vpp=1)
    full = plain.columns["recompute"] == RECOMPUTE.index("full")
    held = Least.of(question, plain, split=False)
    again = np.broadcast_to(held.again(question), len(plain))
    assert np.all(full | (again == 0))
    heavy = np.flatnonzero(full)
    more = least_with_sums(question, plain.take(heavy))
    less = least_with_sums(question, lighter(plain.take(heavy)))
    least = np.minimum(more, less + again[heavy] * (more - less))
    assert np.all(least <= scores.seconds[heavy] * (1 + 1e-9))


def test_uneven_stages_are_not_skipped(ask: Callable[..., Question]) -> None:
    """The first of four layers has no experts: the engine's three stages are quicker than those the cost model assumes,
    and one micro-batch waits for all of them."""
    question = ask(MIXED, "h100x24", global_batch=48)
    layout = Layout.parse("dp=8,tp=1,pp=3,ep=4,zero=2,micro_batch=6")
    alone = score(question, Space.of([layout], question))
    assert alone.even[0] <= alone.seconds[0]
    every = score_all(question, scheduled(question, bases(question, 24)))
    best = every.best(1, "time", distinct=False)
    assert search(question, 24, keep=1).seconds == pytest.approx(best.seconds, rel=1e-8)


@pytest.mark.parametrize(
    ("model", "accelerators", "batch", "sequence"),
    [("qwen3-30b-a3b", 6, 6, 4096), ("qwen3-30b-a3b", 6, 24, 4096), ("llama3-8b", 2, 8, 8192)],
)
def test_what_is_fast_enough_with_some_layers_recomputed_is_found(
    ask: Callable[..., Question], model: str, accelerators: int, batch: int, sequence: int
) -> None:
    """The best recomputes some layers; with all of them it would take longer than is asked for."""
    question = resized(ask(model, "h100x32", global_batch=batch, sequence=sequence), accelerators)
    best = search(question, accelerators, keep=1)
    assert best.space.layout(0).recompute_layers
    slowest = float(best.seconds[0]) * (1 + 1e-6)
    assert search(question, accelerators, keep=1, slowest=slowest).space.layout(0) == best.space.layout(0)
    assert not len(search(question, accelerators, keep=1, slowest=0.99 * slowest).space)
