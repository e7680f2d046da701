"""Finalists: simulated time and memory of every rank."""

from collections.abc import Callable

import numpy as np
import pytest

from cuboid.planning.choose import predict
from cuboid.planning.question import Question
from cuboid.planning.refine import makespans, short_counts, stage_seconds
from cuboid.planning.stages import held
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import simulate
from cuboid.spec.layout import Layout

LAYOUTS = [
    "dp=2,tp=2,pp=16",
    "dp=4,tp=2,pp=8,schedule=interleaved,vpp=2",
    "dp=4,tp=2,pp=8,schedule=zb1p",
    "dp=4,tp=2,pp=8,schedule=zbv",
    "dp=8,tp=2,pp=4,schedule=dualpipev",
    "dp=16,tp=2,pp=2,schedule=gpipe",
    "dp=8,tp=8,pp=1,zero=1",
]


@pytest.fixture
def question(ask: Callable[..., Question]) -> Question:
    return ask("llama3-70b", "h100x64", global_batch=320, sequence=2048)


@pytest.mark.parametrize("text", [text for text in LAYOUTS if "pp=1" not in text.split(",")])
def test_a_short_run_tells_the_time_of_a_long_one(question: Question, text: str) -> None:
    layout = Layout.parse(text)
    batches = 320 // layout.dp
    seconds = stage_seconds(question, layout)
    costs = seconds.costs
    totals = np.array(costs.forward) + np.array(costs.input_backward) + np.array(costs.weight_backward)
    part = held(question.model, layout.schedule, layout.pp, layout.vpp, 2048)
    alone, delayed = makespans(layout, seconds, batches, float(part.by_rank(totals).max()))
    schedule = make_schedule(layout.schedule, layout.pp, batches, layout.vpp)
    assert alone == pytest.approx(simulate(schedule, costs).makespan, rel=0.01)
    assert delayed == pytest.approx(simulate(schedule, costs, seconds.message).makespan, rel=0.01)


def test_short_counts_are_whole_rounds_apart() -> None:
    assert short_counts(4, 12) == (12, 12)
    assert short_counts(16, 1000, gpipe=True) == (1000, 1000)
    for ranks in (2, 3, 8, 16):
        for batches in (100, 101, 257):
            low, high = short_counts(ranks, batches)
            assert high - low in (0, ranks)
            assert low <= high <= batches
            assert (batches - low) % ranks == 0


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_memory_table_sums_to_its_total(question: Question, text: str) -> None:
    plan = predict(question, Layout.parse(text))
    assert len(plan.memory) == plan.layout.pp
    for row, total in zip(plan.memory, plan.totals, strict=True):
        assert sum(row.values()) == pytest.approx(total, rel=1e-12)
        assert all(value >= 0 for value in row.values())
    assert plan.peak == max(plan.totals)
    assert sum(plan.layers) == question.model.layers
    assert len(plan.layers) == plan.layout.stages


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_parts_of_a_step_sum_to_it(question: Question, text: str) -> None:
    plan = predict(question, Layout.parse(text))
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert all(value >= 0 for value in plan.parts.values())
    assert 0 <= plan.bubble < 1
    assert plan.tokens == pytest.approx(320 * 2048 / plan.seconds / 64)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv", "dualpipev", "gpipe"])
def test_the_bubble_falls_as_micro_batches_grow(ask: Callable[..., Question], schedule: str) -> None:
    bubbles = []
    for batch in (16, 32, 64, 128):
        question = ask("llama3-70b", "h100x64", global_batch=batch, sequence=2048)
        bubbles.append(predict(question, Layout.parse(f"dp=2,tp=8,pp=4,schedule={schedule}")).bubble)
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[0] > bubbles[-1]


def test_first_ranks_of_1f1b_hold_more_micro_batches(question: Question) -> None:
    plan = predict(question, Layout.parse("dp=2,tp=2,pp=16"))
    activations = [row["activations"] / plan.layers[rank] for rank, row in enumerate(plan.memory)]
    assert activations == sorted(activations, reverse=True)


def test_zero_stages_never_hold_more(question: Question) -> None:
    peaks = [predict(question, Layout.parse(f"dp=4,tp=8,pp=2,zero={stage}")).peak for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)


def test_closed_form_and_simulation_agree_without_a_pipeline(question: Question) -> None:
    plan = predict(question, Layout.parse("dp=8,tp=8,pp=1,zero=1"))
    assert plan.bubble == plan.parts["bubble"] == 0.0
    assert plan.parts["transfer"] == 0.0
