"""How much of the time is training: the closed form against the textbook, its limits, and a simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.cost.goodput import (
    HOUR,
    PUBLISHED,
    Costs,
    MemoryCopies,
    best_interval,
    curve,
    effective_fraction,
    recommend,
    simulate,
    young_daly,
)

EASY = Costs(stall=5, write=0, detect=5, restart=30, load=5)
RARE = 1e6


def test_rare_failures_give_the_interval_of_young_and_daly() -> None:
    assert best_interval(RARE, EASY) == pytest.approx(young_daly(RARE, EASY.stall), rel=0.01)
    first_order = 1 - EASY.stall / 3000 - (EASY.recovery + 1500) / RARE
    assert effective_fraction(RARE, 3000, EASY) == pytest.approx(first_order, abs=1e-5)


def test_limits() -> None:
    free = Costs(stall=0, write=0, detect=0, restart=0, load=0)
    assert effective_fraction(HOUR, 1e-3, free) == pytest.approx(1)
    assert effective_fraction(1e15, 600, Costs(stall=60)) == pytest.approx(600 / 660)
    assert effective_fraction(60, 600, Costs()) < 1e-3
    assert best_interval(HOUR, free) == pytest.approx(free.shortest_interval, rel=0.01)
    never_used = replace(EASY, memory=MemoryCopies(stall=0, survives=0))
    assert effective_fraction(HOUR, 300, never_used) == pytest.approx(effective_fraction(HOUR, 300, EASY))
    always = MemoryCopies(every=1, stall=0, write=0, load=0, survives=1)
    safe = replace(free, stall=1, memory=always)
    assert effective_fraction(HOUR, 1e5, safe) == pytest.approx(1, abs=1e-3)
    assert effective_fraction(HOUR, 300, replace(EASY, memory=MemoryCopies(stall=1e9))) == 0


@given(st.floats(600, 1e6), st.floats(0.01, 60), st.floats(0, 300), st.floats(0, 1200))
def test_the_recommended_interval_is_the_best_one(mtbf: float, stall: float, write: float, restart: float) -> None:
    costs = Costs(stall=stall, write=write, restart=restart)
    best = recommend(mtbf, costs)
    assert 0 <= best.fraction <= 1
    for factor in (0.5, 0.9, 1.1, 2.0):
        other = max(best.interval * factor, costs.shortest_interval)
        assert effective_fraction(mtbf, other, costs) <= best.fraction * (1 + 1e-6)
    assert recommend(mtbf * 2, costs).fraction >= best.fraction
    assert recommend(mtbf, replace(costs, restart=restart + 60)).fraction <= best.fraction


@pytest.mark.parametrize("memory", [None, MemoryCopies(every=120)], ids=["disk", "memory"])
@pytest.mark.parametrize(("mtbf", "interval"), [(7.9 * HOUR, 240), (1.8 * HOUR, 600), (1062, 66), (1062, 300)])
def test_the_simulation_agrees(mtbf: float, interval: float, memory: MemoryCopies | None) -> None:
    costs = Costs(memory=memory)
    seen = [simulate(mtbf, interval, costs, failures=60, seed=seed) for seed in range(8)]
    fractions = [spent.effective for spent in seen]
    error = 4 * stdev(fractions) / math.sqrt(len(fractions))
    # The two levels of copies are treated one after the other, which is not quite exact.
    assert mean(fractions) == pytest.approx(
        effective_fraction(mtbf, interval, costs), abs=error + (0.004 if memory else 1e-4)
    )
    for spent in seen:
        assert min(spent.training, spent.redone, spent.saving, spent.down) >= 0
        assert spent.down >= 60 * (costs.detect + costs.restart)


def test_the_simulation_repeats_itself() -> None:
    assert simulate(HOUR, 100, Costs(), seed=3) == simulate(HOUR, 100, Costs(), seed=3)
    assert simulate(HOUR, 100, Costs(), seed=3) != simulate(HOUR, 100, Costs(), seed=4)


def test_a_save_waits_for_the_one_before_it() -> None:
    """Asked for more often than it can be written, a checkpoint makes training wait."""
    hurried = simulate(1e5, 10, Costs(stall=1, write=100), failures=20)
    assert hurried.saving / hurried.training == pytest.approx(9.1, rel=0.02)


def test_published_rates() -> None:
    rsc, llama = PUBLISHED["rsc"], PUBLISHED["llama3"]
    assert rsc.seconds(1024) == pytest.approx(7.9 * HOUR)
    assert rsc.seconds(16384) == pytest.approx(1.8 * HOUR)
    assert rsc.seconds(4096) == pytest.approx(math.sqrt(7.9 * 1.8) * HOUR)
    assert rsc.seconds(512) == pytest.approx(2 * 7.9 * HOUR)
    assert llama.seconds(16384) == pytest.approx(3.1 * HOUR, rel=0.01)
    assert llama.seconds(32768) == pytest.approx(llama.seconds(16384) / 2)


def test_published_shares_are_near() -> None:
    """Llama 3: over 90 %. FT-HSDP at 100,000 GPUs: 44 % with recoveries of ten minutes, 80 % with three."""
    assert recommend(PUBLISHED["llama3"].seconds(16384), Costs(restart=600)).fraction > 0.9
    at_100k = PUBLISHED["rsc"].seconds(100_000)
    for minutes, published in ((10, 0.44), (3, 0.80)):
        costs = Costs(detect=0, restart=60 * minutes, load=0)
        assert recommend(at_100k, costs).fraction == pytest.approx(published, abs=0.1)


def test_copies_in_memory_pay_where_failures_are_frequent() -> None:
    copies = replace(Costs(), memory=MemoryCopies())
    gains = [
        recommend(PUBLISHED["rsc"].seconds(size), copies).fraction
        - recommend(PUBLISHED["rsc"].seconds(size), Costs()).fraction
        for size in (1024, 16384, 100_000)
    ]
    assert 0 < gains[0] < gains[1] < gains[2]


def test_a_curve_begins_where_saves_do_not_overtake_each_other() -> None:
    fractions = curve(HOUR, Costs(), [10, 66, 600])
    assert math.isnan(fractions[0])
    assert fractions[1:] == [effective_fraction(HOUR, interval, Costs()) for interval in (66, 600)]
