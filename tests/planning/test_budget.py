"""The planner recomputes no more layers than the memory there is asks for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cuboid.planning.choose import plans, predict
from cuboid.planning.explain import explain, memory_lines
from cuboid.planning.oom_advice import relief
from cuboid.planning.plan import GIB, Plan, dump_plan, load_plan
from cuboid.planning.question import Question
from cuboid.planning.score import score
from cuboid.planning.search import search
from cuboid.planning.space import Space
from cuboid.report.layouts import explorer
from cuboid.report.source import Source
from cuboid.spec.layout import Layout
from cuboid.spec.run import build_run
from tests.planning.conftest import every_layout, every_mix

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
