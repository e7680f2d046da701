"""What each rank holds is what the schedules and the engine say, and its time is the sum of its parts."""

from collections.abc import Callable

import numpy as np
import pytest

from cuboid.cost.estimate import estimate
from cuboid.planning.question import Question
from cuboid.planning.score import BUSY, least_scheduled, score
from cuboid.planning.space import Space, bases, scheduled
from cuboid.planning.stages import LayerSeconds, assumed_slowest, held, real_slowest
from cuboid.schedule.schedules import make_schedule
from cuboid.spec.layout import SCHEDULES, Layout
from cuboid.spec.model import load_model
from cuboid.spec.partition import partition

PAIRS = [("1f1b", 1), ("gpipe", 1), ("zb1p", 1), ("interleaved", 3), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("schedule", "vpp"), PAIRS)
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_stages_sit_where_the_schedule_puts_them(schedule: str, vpp: int, pp: int) -> None:
    part = held(load_model("llama3-8b"), Layout(pp=pp, schedule=schedule, vpp=vpp), 4096)
    assert part.rank == make_schedule(schedule, pp, 4, vpp).stage_rank
    layout = Layout(pp=pp, schedule=schedule, vpp=vpp)
    for rank in range(pp):
        assert tuple(stage for stage, holder in enumerate(part.rank) if holder == rank) == layout.stages_of(rank)
    first, last = part.ends()
    assert first.tolist().index(1) == 0
    assert last.tolist().index(1) == layout.last_stage_rank


@pytest.mark.parametrize(("schedule", "vpp"), PAIRS)
def test_layers_are_those_the_engine_trains(schedule: str, vpp: int) -> None:
    model = load_model("llama3-8b")
    part = held(model, Layout(pp=4, schedule=schedule, vpp=vpp), 4096)
    assert part.counts == tuple(len(layers) for layers in partition(model, 4 * vpp, 4096))
    assert part.layers.sum() == 32
    assert sum(part.mixture) == 0


def test_layers_given_by_hand_are_on_their_stages() -> None:
    layout = Layout.parse("pp=2,schedule=zbv,layers=3:20:8:1")
    part = held(load_model("llama3-8b"), layout, 4096)
    assert part.counts == (3, 20, 8, 1) and part.layers.tolist() == [4, 28]


def test_leading_dense_layers_of_a_mixture_are_on_the_first_stages() -> None:
    part = held(load_model("deepseek-v3"), Layout(pp=16), 4096)
    assert sum(part.dense) == 3
    assert part.dense[0] > 0
    assert sum(part.dense) + sum(part.mixture) == 61


def test_different_ranks_are_all_kinds_of_ranks() -> None:
    part = held(load_model("gpt3-175b"), Layout(pp=8, schedule="zbv"), 2048)
    first, last = part.ends()
    rows = zip(part.by_rank(part.dense), part.by_rank(part.mixture), first, last, strict=True)
    assert {tuple(column) for column in part.different_ranks()[0].T} == set(rows)


def layouts(model: str) -> list[Layout]:
    found = [Layout.parse("dp=8,tp=4,pp=1"), Layout.parse("dp=2,tp=2,pp=8")]
    found += [Layout.parse(f"dp=4,tp=2,pp=4,schedule={name},vpp={vpp}") for name, vpp in PAIRS]
    return found


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b"])
def test_the_slowest_rank_is_the_largest_sum(ask: Callable[..., Question], model: str) -> None:
    question = ask(model, "h100x32", global_batch=64, sequence=2048)
    space = Space.of(layouts(model), question)
    seconds = LayerSeconds.of(question, space.jobs)
    slowest = real_slowest(question, space, seconds)
    dense, mixture, head, embedding = (
        np.broadcast_to(value, len(space))
        for value in (seconds.dense, seconds.mixture, seconds.head, seconds.parts.embedding)
    )
    for index, layout in enumerate(layouts(model)):
        part = held(question.model, layout, 2048)
        ranks = [0.0] * layout.pp
        for stage, rank in enumerate(part.rank):
            ranks[rank] += part.dense[stage] * dense[index] + part.mixture[stage] * mixture[index]
        ranks[part.rank[0]] += embedding[index]
        ranks[part.rank[-1]] += head[index]
        assert slowest[index] == pytest.approx(max(ranks))
        assert slowest[index] >= sum(ranks) / layout.pp * (1 - 1e-9)


def test_scores_are_estimates_with_the_slowest_rank_replaced(ask: Callable[..., Question]) -> None:
    question = ask("llama3-70b", "h100x32", global_batch=64, sequence=2048)
    space = Space.of(layouts("llama3-70b"), question)
    scores = score(question, space)
    seconds = LayerSeconds.of(question, space.jobs)
    assumed, real = assumed_slowest(question, space, seconds), real_slowest(question, space, seconds)
    for index, layout in enumerate(layouts("llama3-70b")):
        plain = estimate(question.model, question.machine, layout, global_batch=64, sequence=2048)
        batches = 64 // (layout.dp * layout.micro_batch)
        before = sum(plain.parts[name] for name in BUSY)
        after = sum(float(scores.parts[name][index]) for name in BUSY)
        assert after - before == pytest.approx(batches * float(real[index] - assumed[index]), rel=1e-6, abs=1e-9)
        for name in ("transfer", "data", "optimizer"):
            assert float(scores.parts[name][index]) == pytest.approx(plain.parts[name])
        if layout.schedule == "1f1b":  # what all ranks take together has not changed
            idle = plain.parts["bubble"] + float(assumed[index] - real[index])
            assert float(scores.parts["bubble"][index]) == pytest.approx(idle, rel=1e-6, abs=1e-9)
        straggling = plain.parts["straggler"] / (before + plain.parts["bubble"])
        waited = after + float(scores.parts["bubble"][index])
        assert float(scores.parts["straggler"][index]) == pytest.approx(straggling * waited)
        assert scores.memory[index] == pytest.approx(plain.memory)


def test_no_schedule_takes_less_than_the_bound(ask: Callable[..., Question]) -> None:
    """What prunes the search: a bound from 1F1B that holds for every schedule of the same ranks."""
    question = ask("llama3-70b", "h100x32", global_batch=64, sequence=2048)
    for pp in (2, 4, 8):
        pairs = [(name, vpp) for name, vpp in PAIRS if SCHEDULES.index(name) >= 0]
        variants = [Layout.parse(f"dp={16 // pp},tp=2,pp={pp},schedule={name},vpp={vpp}") for name, vpp in pairs]
        scores = score(question, Space.of(variants, question))
        assert np.all(scores.seconds >= scores.even[0] * (1 - 1e-9))
        assert np.all(scores.memory >= scores.memory[0] * (1 - 1e-9))


@pytest.mark.parametrize("model", ["gpt3-175b", "deepseek-v3", "qwen3-30b-a3b"])
def test_no_layout_takes_less_than_the_bound_of_its_schedule(ask: Callable[..., Question], model: str) -> None:
    question = ask(model, "h100x256", global_batch=480, sequence=2048)
    space = bases(question, 256)
    some = space.take(np.random.default_rng(3).choice(len(space), 300))
    space = scheduled(question, some)
    seconds, least = score(question, space).seconds, least_scheduled(question, space)
    assert np.all(least <= seconds * (1 + 1e-9))
    # It knows more than that no stage is idle: what 1F1B waits for, say.
    assert np.any(least > 0.9 * seconds)
