"""Islands that are lost: the closed form against a simulation, failure by failure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.cost.island_goodput import IslandFailures, island_goodput, simulate_islands


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.builds(IslandFailures, mtbf=st.floats(2e4, 1e6), down=st.floats(1, 2000), redone=st.floats(0, 300)),
        min_size=2,
        max_size=5,
    )
)
def test_the_closed_form_is_what_happens(islands: list[IslandFailures]) -> None:
    expected = island_goodput(islands, grace=20).expected
    assert simulate_islands(islands, grace=20, failures=8000) == pytest.approx(expected, abs=0.01)


def test_an_island_that_is_lost_costs_only_its_part() -> None:
    healthy, frail = IslandFailures(1e12, 500, 100), IslandFailures(1000, 1000, 0)
    found = island_goodput([healthy, frail], grace=0)
    assert found.present[0] == pytest.approx(1)
    assert found.present[1] == pytest.approx(1 / 2.718281828)  # it is lost while it starts, too
    assert found.expected == pytest.approx((1 + found.present[1]) / 2)
    assert found.survivors_lose == 0


def test_survivors_wait_for_the_grace_once() -> None:
    found = island_goodput([IslandFailures(1e12, 1, 0), IslandFailures(10_000, 10, 0)], grace=100)
    assert found.survivors_lose == pytest.approx(0.01, rel=0.01)


def test_one_that_never_starts_does_nothing() -> None:
    assert IslandFailures(1, 1000, 0).present == 0
