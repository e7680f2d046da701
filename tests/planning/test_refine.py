"""Finalists: simulated time and memory of every rank."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cuboid.planning.choose import plans, predict
from cuboid.planning.explain import explain, memory_lines
from cuboid.planning.oom_advice import relief
from cuboid.planning.plan import GIB, Plan, dump_plan, load_plan
from cuboid.planning.question import Question
from cuboid.planning.refine import Pipeline, makespans, short_counts, stage_seconds
from cuboid.planning.score import score
from cuboid.planning.search import search
from cuboid.planning.space import Space
from cuboid.planning.stages import held
from cuboid.report.layouts import explorer
from cuboid.report.source import Source
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import simulate
from cuboid.spec.layout import Layout
from cuboid.spec.run import build_run
from tests.planning.conftest import every_layout, every_mix

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
    part = held(question.model, layout, 2048)
    ((alone, delayed),) = makespans([Pipeline(layout, seconds, batches, float(part.by_rank(totals).max()))])
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


Ask = Callable[..., Question]
ONE_GPU = {"tp": 1, "pp": 1, "micro_batch": 1, "offload": False, "zero": 0}


@pytest.fixture
def alone(ask: Ask) -> Question:
    """Llama 3 8B with its optimizer on one H200: all layers fully recomputed fit, no layer so does not."""
    return ask("llama3-8b", "h200x1", global_batch=8, sequence=8192, fixed=ONE_GPU)


def test_a_number_between_where_neither_end_is_best(alone: Question, tmp_path: Path) -> None:
    best = plans(alone)[0]
    layers = best.layout.recompute_layers
    assert best.layout.recompute == "full" and 0 < layers < 32
    assert best.peak <= alone.limit
    # One layer less does not fit, nor does one kind less for all; all of them fit and take longer.
    assert predict(alone, replace(best.layout, recompute_layers=layers - 1)).peak > alone.limit
    assert predict(alone, Layout(recompute="selective")).peak > alone.limit
    whole = predict(alone, Layout(recompute="full"))
    assert whole.peak <= alone.limit and whole.seconds > best.seconds
    reason = f"full recomputation of {layers} layers, selective recomputation of the others"
    assert any(reason in line for line in best.reasons)
    assert any(reason in line for line in memory_lines(explain(alone, best.layout, rivals=0)))
    (tmp_path / "plan.toml").write_text(dump_plan(best))
    assert load_plan(tmp_path / "plan.toml").layout == best.layout


def test_less_memory_takes_more_layers(alone: Question) -> None:
    found = [plans(replace(alone, memory_limit=limit * GIB))[0].layout for limit in (139, 136, 133, 131)]
    numbers = [layout.recompute_layers for layout in found]
    assert numbers == sorted(numbers) and len(set(numbers)) == 4


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_stages_of_a_pipeline(ask: Ask, schedule: str) -> None:
    """Each rank, simulated, stays within the limit; with a layer less of each stage one does not."""
    fixed = {"tp": 2, "pp": 4, "micro_batch": 2, "zero": 1, "schedule": schedule, "cp": 1, "offload": False}
    question = ask("llama3-8b", "h100x8", global_batch=32, sequence=8192, fixed=fixed, memory_limit=34 * GIB)
    best = plans(question)[0]
    layers = best.layout.recompute_layers
    assert layers > 0 and best.peak <= question.limit
    assert any(f"recomputation of {layers} layers of each stage" in line for line in best.reasons)
    if layers > 1:
        assert predict(question, replace(best.layout, recompute_layers=layers - 1)).peak > question.limit
    assert predict(question, best.layout).seconds == pytest.approx(best.seconds)


@pytest.mark.parametrize("limit", [2.8, 2.9, 3.0])
def test_nothing_that_could_be_tried_is_faster(ask: Ask, limit: float) -> None:
    question = ask(cluster="h100x2", global_batch=4, sequence=32768, memory_limit=limit * GIB)
    layouts = list(every_layout(question, 2))
    layouts += [mix for layout in layouts for mix in every_mix(question, layout)]
    scores = score(question, Space.of(layouts, question))
    found = search(question, 2, keep=3)
    assert found.space.layout(0).recompute_layers > 0
    assert found.seconds[0] == pytest.approx(scores.seconds[scores.fits].min(), rel=1e-9)


def test_what_the_user_decides_stays(alone: Question) -> None:
    def fixed(**more: object) -> Plan:
        return plans(replace(alone, fixed={**ONE_GPU, **more}))[0]

    assert str(fixed(recompute_layers=0).layout) == "dp=1,tp=1,pp=1,recompute=full"
    assert str(fixed(recompute="full").layout) == "dp=1,tp=1,pp=1,recompute=full"
    some = fixed(recompute="full", recompute_layers=30)
    assert str(some.layout) == "dp=1,tp=1,pp=1,recompute=full,recompute_layers=30"


def test_selective_recomputation_is_mixed_where_it_takes_time(ask: Ask) -> None:
    """On CPUs, where blocks are not compiled; on GPUs all layers are selective or none is."""
    fixed = {"dp": 1, "tp": 1, "pp": 2, "micro_batch": 8}
    question = ask(cluster="cpux2", sequence=2048, precision="float32", fixed=fixed)
    kept = predict(question, Layout(pp=2, micro_batch=8)).peak
    best = plans(replace(question, memory_limit=0.97 * kept))[0].layout
    assert best.recompute == "selective" and best.recompute_layers in (1, 2)


def test_other_engines_recompute_all_layers_alike(alone: Question) -> None:
    assert plans(replace(alone, engine="megatron", fixed={}))[0].layout.recompute_layers == 0


def test_a_rank_without_memory_is_advised_to_recompute_some_layers(alone: Question) -> None:
    training = {"global_batch": 8, "sequence": 8192, "precision": "bf16"}
    run = build_run({"model": "llama3-8b", "layout": "recompute=selective", "training": training})
    found = relief(run, alone.cluster, 0, 0.0, alone.cluster.memory_gib * GIB)
    assert found is not None and found.enough
    assert found.change.startswith("recompute=full,recompute_layers=")
    again = replace(run, layout=Layout.parse(f"{found.change}"))
    more = relief(again, alone.cluster, 0, 0.0, 0.985 * alone.cluster.memory_gib * GIB)
    assert more is not None and more.enough and more.change.startswith("recompute_layers=")


def test_the_explorer_starts_at_the_plan(alone: Question) -> None:
    best = plans(alone)[0]
    table = explorer(Source(best.run, None))
    assert table is not None
    assert table["own"]["recompute"] == f"full, {best.layout.recompute_layers} layers"
    assert table["own"]["recompute"] in table["axes"]["recompute"]
