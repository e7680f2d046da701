"""The search returns what trying everything returns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuboid.planning.question import Question
from cuboid.planning.score import Scores, score
from cuboid.planning.search import any_fits, search
from cuboid.planning.space import Space, bases, divisors, scheduled
from cuboid.spec.fitting import check
from cuboid.spec.layout import Layout
from tests.planning.conftest import MIXED, every_layout

GIB = 2**30
ALIKE = {"recompute_layers": 0}


def idle_zero(layout: Layout) -> bool:
    """ZeRO with nobody to share with, which is the same as none."""
    return layout.zero > 0 and layout.dp * layout.cp == 1


def kept(layout: Layout) -> bool:
    """Whether the search looks at the layout, by the rules its file states."""
    if layout.pp == 1 and layout.schedule != "1f1b":
        return False
    if layout.schedule == "gpipe" or idle_zero(layout):
        return False
    return layout.tp == 1 or layout.sequence_parallel


def brute(question: Question, world_size: int, objective: str = "time") -> tuple[Scores, list[Layout]]:
    """Every layout that fits, best first."""
    layouts = list(every_layout(question, world_size))
    scores = score(question, Space.of(layouts, question))
    fitting = scores.take(np.flatnonzero(scores.fits))
    ordered = fitting.take(fitting.order(objective))
    return ordered, layouts


@pytest.mark.parametrize(
    ("objective", "limit"),
    [
        ("time", 6.3),
        ("memory", None),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("time", None), ("time", 6.6), ("memory", 6.6), ("memory", 6.3))
        ),
    ],
)
def test_search_equals_brute_force(ask: Callable[..., Question], objective: str, limit: float | None) -> None:
    question = ask(memory_limit=limit * GIB if limit else None, sequence=2048, fixed=ALIKE)
    every, _ = brute(question, 8, objective)
    found = search(question, 8, keep=20, objective=objective)
    metric = (lambda scores: scores.memory) if objective == "memory" else (lambda scores: scores.seconds)
    assert len(found.space) > 0
    assert metric(found)[0] == pytest.approx(metric(every)[0], rel=1e-9)
    looked_at = [index for index in range(len(every.space)) if kept(every.space.layout(index))]
    best = every.take(np.array(looked_at[:20]))
    assert metric(found) == pytest.approx(metric(best), rel=1e-8)


def test_what_is_left_out_is_never_better(ask: Callable[..., Question]) -> None:
    """For every layout the search skips there is one it looks at that is no slower, and no fuller by half a percent."""
    question = ask(global_batch=4)
    layouts = list(every_layout(question, 4))
    scores = score(question, Space.of(layouts, question))
    looked_at = np.array([kept(layout) for layout in layouts])
    seconds, memory = scores.seconds, scores.memory
    assert 0 < looked_at.sum() < len(layouts)
    skipped = [index for index in np.flatnonzero(~looked_at) if not idle_zero(layouts[index])]
    for index in skipped:
        better = (seconds[looked_at] <= seconds[index] * (1 + 1e-9)) & (memory[looked_at] <= memory[index] * 1.005)
        assert better.any(), str(layouts[index])


def test_search_equals_brute_force_with_experts_and_context(ask: Callable[..., Question]) -> None:
    question = ask(MIXED, sequence=256, global_batch=4)
    assert question.explores == {"cp", "ep"}
    every, _ = brute(question, 8)
    found = search(question, 8, keep=5)
    assert found.seconds[0] == pytest.approx(every.seconds[0], rel=1e-9)


def test_the_space_is_every_layout_once(ask: Callable[..., Question]) -> None:
    question = ask(global_batch=6)
    space = scheduled(question, bases(question, 8))
    found = [str(space.layout(index)) for index in range(len(space))]
    expected = [str(layout) for layout in every_layout(question, 8) if kept(layout)]
    assert len(found) == len(set(found))
    assert set(found) == set(expected)


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2},
        {"schedule": "gpipe"},
        {"sequence_parallel": False, "tp": 4},
        {"zero": 1, "shard": 2},
        {"vpp": 2},
        {"recompute": "selective"},
        {"recompute": "full", "recompute_layers": 2},
        {"micro_batch": 2, "pp": 2},
    ],
)
def test_what_the_user_fixes_stays(ask: Callable[..., Question], fixed: dict[str, Any]) -> None:
    question = ask(fixed=fixed)
    found = search(question, 8, keep=50)
    assert len(found.space) > 0
    for index in range(len(found.space)):
        layout = found.space.layout(index)
        check(layout, question.model, global_batch=8, sequence=512, world_size=8)
        assert {name: getattr(layout, name) for name in fixed} == fixed


def test_every_answer_passes_the_check_and_fits(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x64", global_batch=96, sequence=4096)
    found = search(question, 64, keep=200)
    assert len(found.space) == 200
    for index in range(200):
        layout = found.space.layout(index)
        check(layout, question.model, global_batch=96, sequence=4096, world_size=64)
        assert found.memory[index] <= 0.95 * 79.2 * GIB
        assert not question.untrainable(layout)


def test_answers_are_in_order(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x64", global_batch=96, sequence=4096)
    assert np.all(np.diff(search(question, 64, keep=100).seconds) >= -1e-9)
    assert np.all(np.diff(search(question, 64, keep=100, objective="memory").memory) >= -1e-3)


def test_distinct_answers_are_the_best_of_their_kind(ask: Callable[..., Question]) -> None:
    question = ask(sequence=2048, fixed=ALIKE)
    every, _ = brute(question, 8)
    best: dict[tuple[object, ...], float] = {}
    for index, seconds in enumerate(every.seconds):
        layout = every.space.layout(index)
        if kept(layout):
            key = (layout.dp, layout.tp, layout.pp, layout.micro_batch, layout.schedule)
            best.setdefault(key, float(seconds))
    found = search(question, 8, keep=12, distinct=True)
    assert found.seconds == pytest.approx(sorted(best.values())[:12], rel=1e-8)


def test_what_is_wanted_is_found_as_if_all_were_asked(ask: Callable[..., Question]) -> None:
    question = ask(memory_limit=6.6 * GIB, sequence=2048)
    best = search(question, 8, keep=1)
    wanted = search(question, 8, keep=1, wanted=float(best.seconds[0]) * (1 + 1e-8))
    assert wanted.space.layout(0) == best.space.layout(0)
    assert wanted.seconds.tolist() == best.seconds.tolist()
    nothing = search(question, 8, keep=1, wanted=0.5 * float(best.seconds[0]))
    assert not len(nothing.space)


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 5.5, 6, 6.3, None])
def test_anything_fits_where_the_search_finds_something(ask: Callable[..., Question], limit: float | None) -> None:
    question = ask(memory_limit=limit * GIB if limit else None, sequence=2048)
    assert any_fits(question, 8) == (len(search(question, 8, keep=1).space) > 0)


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
